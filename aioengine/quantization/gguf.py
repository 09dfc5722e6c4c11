"""Weights that keep the numbers of GGUF files.

O outputs, I inputs, G groups of inputs, R rows of outputs, X bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from aioengine.kernels import gguf_blocks
from aioengine.kernels.codes import Codes, pack_nibbles
from aioengine.model_files.gguf_model import EMBEDDING
from aioengine.model_files.gguf_quantization import KEPT, StoredTypes
from aioengine.quantization._base import CodesFormat, LinearFormat
from aioengine.quantization.online import OnlineFormat
from aioengine.quantization.plain import PLAIN


def codes_of(rows: Tensor, kind: str) -> Codes:
    """Convert the blocks of rows [R, X] to codes. kind: a type in ``KEPT``."""
    groups = gguf_blocks.groups(rows.reshape(-1), kind)
    numbers, scales = groups.numbers.reshape(len(rows), -1), groups.scales.view(len(rows), -1)
    offsets = None if groups.offsets is None else groups.offsets.view(len(rows), -1)
    if KEPT[kind].kind == "int4":
        return Codes(pack_nibbles(numbers), scales, offsets, 4)
    return Codes(numbers.view(torch.int8), scales, offsets)


class GgufFormat(OnlineFormat):
    """Keeps the integers of a type of GGUF tensors, in the layout of ``Codes``."""

    def __init__(self, kind: str) -> None:
        super().__init__(lambda inputs: KEPT[kind])
        self.stored = kind

    def quantized(self, values: Tensor, inputs: int) -> Iterable[Codes]:
        """values: the bytes of rows [R, X]."""
        return [codes_of(values, self.stored)]


def gguf_formats(stored: StoredTypes) -> tuple[Callable[[str], LinearFormat], Callable[[bool], CodesFormat | None]]:
    """Return ``Placement.format_of`` and ``Placement.table_format``."""
    formats = {kind: GgufFormat(kind) for kind in KEPT}
    kept = {name: formats[kind] for name, kind in stored.kept.items()}
    return lambda name: kept.get(name, PLAIN), lambda is_head: kept.get(EMBEDDING)
