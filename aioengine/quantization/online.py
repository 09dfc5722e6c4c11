"""Linear layers that are quantized while 16-bit weights are loaded.

O outputs, D inputs, G groups of inputs, R rows of outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from aioengine.kernels.code_linear import FP8, MAX_FP8
from aioengine.kernels.codes import Codes, pack_nibbles
from aioengine.kernels.int8_linear import MAX_INT8
from aioengine.quantization._base import CodesFormat, RowWriter
from aioengine.quantization.plain import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from aioengine.model_files.online_quantization import Numbers, OnlineQuantization
    from aioengine.quantization._base import Axis, LinearFormat, LinearSpec, Tensors

PIECE_ELEMENTS: Final = 1 << 20
"""Elements that are quantized at a time, because they need several fp32 tensors."""
MAX_CODE: Final = 15
_TINY: Final = 1e-30
"""Replaces a scale of 0 in divisions."""


def quantize(weight: Tensor, numbers: Numbers) -> Codes:
    """Quantize a weight [R, D].

    The scales and offsets of int8 and int4 are rounded to bf16, because products on a CPU take them in the dtype of the
    activations. The numbers are then chosen for the rounded scales.
    """
    wide = weight.float()
    if numbers.kind == "int4":
        groups = wide.unflatten(1, (-1, numbers.group))
        low, high = groups.aminmax(dim=2)
        scales = ((high - low) / MAX_CODE).bfloat16().float()
        middle = MAX_CODE // 2 + 1
        offsets = (low + middle * scales).bfloat16().float() - middle * scales
        codes = (groups - offsets.unsqueeze(2)) / scales.clamp_min(_TINY).unsqueeze(2)
        codes = codes.round_().clamp_(0, MAX_CODE).to(torch.uint8)
        return Codes(pack_nibbles(codes.flatten(1)), scales, offsets, 4)
    largest = wide.abs().amax(1, keepdim=True)
    if numbers.kind == "fp8":
        scales = largest / MAX_FP8
        return Codes((wide / scales.clamp_min(_TINY)).to(FP8), scales)
    scales = (largest / MAX_INT8).bfloat16().float()
    codes = (wide / scales.clamp_min(_TINY)).round_().clamp_(-MAX_INT8, MAX_INT8)
    return Codes(codes.to(torch.int8), scales)


class OnlineFormat(CodesFormat):
    """Quantizes the weights while they are loaded."""

    def __init__(self, numbers_of: Callable[[int], Numbers]) -> None:
        """numbers_of: inputs of a layer -> how it is quantized."""
        self._numbers_of = numbers_of

    def empty(self, layer: LinearSpec) -> Tensors:
        numbers, device = self._numbers_of(layer.in_features), layer.device
        outputs, inputs = sum(layer.sizes), layer.in_features
        dtype = {"fp8": FP8, "int8": torch.int8, "int4": torch.uint8}[numbers.kind]
        columns = inputs // 2 if numbers.kind == "int4" else inputs
        tensors: Tensors = {"weight": torch.empty(outputs, columns, dtype=dtype, device=device)}
        for name in ("scales", "offsets") if numbers.has_offsets else ("scales",):
            tensors[name] = torch.empty(outputs, inputs // (numbers.group or inputs), device=device)
        return tensors | layer.empty_bias()

    def split(self, layer: LinearSpec, name: str, tensor: Tensor) -> Sequence[Tensor]:
        """Views of bias [O]. Codes are not in the checkpoint."""
        return tensor.split(layer.sizes) if name == "bias" else ()

    def dim_of(self, name: str, axis: Axis) -> tuple[int, int] | None:
        return PLAIN.dim_of(name, axis)

    def codes(self, layer: LinearSpec, tensors: Tensors) -> Codes:
        bits = 4 if tensors["weight"].dtype == torch.uint8 else 8
        return Codes(tensors["weight"], tensors["scales"], tensors.get("offsets"), bits)

    def tensors(self, layer: LinearSpec, codes: Codes) -> Tensors:
        offsets = {} if codes.offsets is None else {"offsets": codes.offsets}
        return {"weight": codes.packed, "scales": codes.scales, **offsets}

    def writers(self, layer: LinearSpec, tensors: Tensors) -> Mapping[str, Sequence[RowWriter]]:
        numbers = self._numbers_of(layer.in_features)
        parts = self.codes(layer, tensors).split(layer.sizes)
        return {"weight": [writer(part, lambda rows: quantize(rows, numbers), layer.dtype) for part in parts]}


def writer(target: Codes, codes_of: Callable[[Tensor], Codes], dtype: torch.dtype) -> RowWriter:
    """Return the writer for the rows of ``target``.

    Args:
        codes_of: loaded rows [R, ...] -> their codes.
        dtype: of the weight before it is quantized.
    """
    (outputs, inputs), tensors = target.shape, (target.packed, target.scales, target.offsets)

    def write(first: int, values: Tensor) -> None:
        """values: [R, ...]."""
        for rows in values.flatten(0, -2).split(max(PIECE_ELEMENTS // inputs, 1)):
            codes = codes_of(rows)
            for tensor, part in zip(tensors, (codes.packed, codes.scales, codes.offsets), strict=True):
                if tensor is not None and part is not None:
                    tensor[first : first + len(rows)] = part
            first += len(rows)

    placeholder = torch.empty((), dtype=dtype, device=target.packed.device).expand(outputs, inputs)
    num_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    return RowWriter(placeholder, write, target.scales, num_bytes)


def online_formats(
    quantization: OnlineQuantization,
) -> tuple[Callable[[str], LinearFormat], Callable[[bool], CodesFormat | None]]:
    """Return ``Placement.format_of`` and ``Placement.table_format``."""
    head = None if (numbers := quantization.head) is None else OnlineFormat(lambda inputs: numbers)
    by_part: dict[str, LinearFormat] = {"layer": OnlineFormat(quantization.layer), "unquantized": PLAIN}
    if head is not None:
        by_part["head"] = head
    return lambda name: by_part[quantization.part_of(name)], lambda is_head: head if is_head else None
