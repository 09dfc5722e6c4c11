"""Linear layers that are quantized while 16-bit weights are loaded. O outputs, D inputs, R rows of outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from aioengine.kernels.codes import Codes
from aioengine.quantization._base import CodesFormat, RowWriter
from aioengine.quantization.plain import PLAIN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from aioengine.quantization._base import Axis, LinearSpec, Tensors

PIECE_ELEMENTS: Final = 4 << 20
"""Elements that are quantized at a time, because they need several fp32 tensors."""


class Int8Format(CodesFormat):
    """int8 numbers with a scale per output."""

    def empty(self, layer: LinearSpec) -> Tensors:
        outputs = sum(layer.sizes)
        return {
            "weight": torch.empty(outputs, layer.in_features, dtype=torch.int8, device=layer.device),
            "scales": torch.empty(outputs, 1, device=layer.device),
            **layer.empty_bias(),
        }

    def split(self, layer: LinearSpec, name: str, tensor: Tensor) -> Sequence[Tensor]:
        return tensor.split(layer.sizes) if name == "bias" else ()

    def dim_of(self, name: str, axis: Axis) -> tuple[int, int] | None:
        return PLAIN.dim_of(name, axis)

    def codes(self, layer: LinearSpec, tensors: Tensors) -> Codes:
        return Codes(tensors["weight"], tensors["scales"])

    def tensors(self, layer: LinearSpec, codes: Codes) -> Tensors:
        return {"weight": codes.packed, "scales": codes.scales}

    def writers(self, layer: LinearSpec, tensors: Tensors) -> Mapping[str, Sequence[RowWriter]]:
        parts = zip(tensors["weight"].split(layer.sizes), tensors["scales"].split(layer.sizes), strict=True)
        return {"weight": [_writer(layer, *part) for part in parts]}


def _writer(layer: LinearSpec, numbers: Tensor, scales: Tensor) -> RowWriter:
    """Return the writer for numbers [O, D] and scales [O, 1]."""

    def write(first: int, values: Tensor) -> None:
        for rows in values.reshape(-1, layer.in_features).split(max(PIECE_ELEMENTS // layer.in_features, 1)):
            part = slice(first, first + len(rows))
            first += len(rows)
            wide = rows.float()
            scales[part] = wide.abs().amax(1, keepdim=True) / 127
            numbers[part] = (wide / scales[part].clamp_min(1e-30)).round().to(torch.int8)

    placeholder = torch.empty((), dtype=layer.dtype, device=layer.device).expand(numbers.shape)
    return RowWriter(placeholder, write, scales, numbers.nbytes + scales.nbytes)
