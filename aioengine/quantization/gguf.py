"""Weights that keep the numbers of GGUF files. R rows, X bytes of a row, G groups of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aioengine.kernels import gguf_blocks
from aioengine.kernels.codes import Codes, pack_nibbles
from aioengine.model_files.gguf_model import EMBEDDING
from aioengine.model_files.gguf_quantization import KEPT
from aioengine.quantization.online import OnlineFormat, writer
from aioengine.quantization.plain import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from aioengine.model_files.gguf_quantization import StoredTypes
    from aioengine.quantization._base import CodesFormat, LinearFormat, LinearSpec, RowWriter, Tensors


def codes_of(rows: Tensor, kind: str) -> Codes:
    """Convert the blocks of rows [R, X] to codes. kind: a type in ``KEPT``."""
    numbers, scales, offsets = (
        None if tensor is None else tensor.reshape(len(rows), -1)
        for tensor in gguf_blocks.groups(rows.reshape(-1), kind)
    )
    assert numbers is not None
    assert scales is not None
    if offsets is not None:
        scales = scales + 0 * offsets  # not finite where an offset is not
    bits = 4 if KEPT[kind].kind == "int4" else 8
    return Codes(pack_nibbles(numbers) if bits == 4 else numbers.view(torch.int8), scales, offsets, bits)


class GgufFormat(OnlineFormat):
    """Keeps the numbers of a type in GGUF files."""

    def __init__(self, kind: str) -> None:
        super().__init__(lambda inputs: KEPT[kind])
        self.kind = kind

    def writers(self, layer: LinearSpec, tensors: Tensors) -> Mapping[str, Sequence[RowWriter]]:
        parts = self.codes(layer, tensors).split(layer.sizes)
        writers = [writer(part, lambda rows: codes_of(rows, self.kind), layer.dtype) for part in parts]
        return {"weight": [part._replace(stored=self.kind) for part in writers]}


def gguf_formats(
    stored: StoredTypes,
) -> tuple[Callable[[str], LinearFormat], Callable[[bool], CodesFormat | None]]:
    """Return ``Placement.format_of`` and ``Placement.table_format``."""
    formats = {kind: GgufFormat(kind) for kind in KEPT}
    kept = {name: formats[kind] for name, kind in stored.kept.items()}
    return lambda name: kept.get(name, PLAIN), lambda is_head: kept.get(EMBEDDING)
