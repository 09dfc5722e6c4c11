"""Weights that keep the numbers of GGUF files.

O outputs, D inputs, G groups of inputs, R rows of outputs, X bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from aioengine.kernels import gguf_blocks
from aioengine.kernels.codes import Codes, pack_nibbles
from aioengine.model_files.gguf_model import EMBEDDING
from aioengine.model_files.gguf_quantization import KEPT, StoredTypes
from aioengine.quantization._base import CodesFormat, LinearFormat, LinearSpec, RowWriter, Tensors
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
        self.kind = kind

    def empty(self, layer: LinearSpec) -> Tensors:
        tensors = super().empty(layer)
        return tensors | {"offsets": torch.empty_like(tensors["scales"])} if KEPT[self.kind].has_offsets else tensors

    def codes(self, layer: LinearSpec, tensors: Tensors) -> Codes:
        codes = super().codes(layer, tensors)
        return codes._replace(offsets=tensors["offsets"]) if "offsets" in tensors else codes

    def tensors(self, layer: LinearSpec, codes: Codes) -> Tensors:
        offsets = codes.offsets if KEPT[self.kind].has_offsets else None
        return super().tensors(layer, codes) | ({} if offsets is None else {"offsets": offsets.contiguous()})

    def writers(self, layer: LinearSpec, tensors: Tensors) -> Mapping[str, Sequence[RowWriter]]:
        names = [name for name in ("weight", "scales", "offsets") if name in tensors]
        parts = zip(*(tensors[name].split(layer.sizes) for name in names), strict=True)
        return {"weight": [self._writer(layer, *part) for part in parts]}

    def _writer(self, layer: LinearSpec, packed: Tensor, scales: Tensor, offsets: Tensor | None = None) -> RowWriter:
        """Return the writer for codes [O, D] or, packed, [O, D / 2], and scales and offsets [O, G]."""

        def write(first: int, rows: Tensor) -> None:
            """rows: the bytes [R, X]."""
            codes, stop = codes_of(rows, self.kind), first + len(rows)
            packed[first:stop], scales[first:stop] = codes.packed, codes.scales
            if offsets is not None and codes.offsets is not None:
                offsets[first:stop] = codes.offsets
                scales[first:stop] += 0 * codes.offsets  # the scale is not finite if the offset is not

        num_bytes = sum(0 if tensor is None else tensor.nbytes for tensor in (packed, scales, offsets))
        placeholder = torch.empty((), dtype=layer.dtype, device=layer.device).expand(len(packed), layer.in_features)
        return RowWriter(placeholder, write, scales, num_bytes, stored=self.kind)


def gguf_formats(stored: StoredTypes) -> tuple[Callable[[str], LinearFormat], Callable[[bool], CodesFormat | None]]:
    """Return ``Placement.format_of`` and ``Placement.table_format``."""
    formats = {kind: GgufFormat(kind) for kind in KEPT}
    kept = {name: formats[kind] for name, kind in stored.kept.items()}
    return lambda name: kept.get(name, PLAIN), lambda is_head: kept.get(EMBEDDING)
