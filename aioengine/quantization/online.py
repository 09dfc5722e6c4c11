"""Linear layers that are quantized while their weights are loaded.

O outputs, I inputs, G groups of inputs, R rows of outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from aioengine.kernels.codes import FP8, FP8_MAX, MAX_INT8, MIDDLE, Codes, pack_nibbles
from aioengine.model_files.online_quantization import OnlineQuantization, Precision
from aioengine.quantization._base import CodesFormat, LinearFormat, LinearSpec, RowWriter, Tensors
from aioengine.quantization.plain import PLAIN

PIECE_ELEMENTS: Final = 1 << 20
"""Elements that are quantized at a time, because they need several fp32 tensors."""
SHRINKS: Final = (1.0, 0.93, 0.87)
"""Factors of the scales that are tried in int4. Smaller scales clip the largest numbers, and round the others better.

On normally distributed weights in groups of 128, the best of three has 5 % less error than the first.
"""


def quantize(weight: Tensor, precision: Precision) -> Codes:
    """Quantize a weight [R, I].

    The scales of int8 and int4 are rounded to bf16, because products on a CPU take them in the dtype of the
    activations. The numbers are then chosen for the rounded scales.
    """
    wide = weight.float()
    if precision.kind == "int4":
        codes, scales = _int4(wide.unflatten(1, (-1, precision.group)))
        return Codes(pack_nibbles(codes.flatten(1)), scales, -MIDDLE * scales, 4)
    largest = wide.abs().amax(1, keepdim=True)
    if precision.kind == "fp8":
        scales = _without_zeros(largest / FP8_MAX)
        return Codes((wide / scales).to(FP8), scales)
    scales = _without_zeros((largest / MAX_INT8).bfloat16().float())
    return Codes((wide / scales).round_().clamp_(-MAX_INT8, MAX_INT8).to(torch.int8), scales)


def _int4(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [R, G, I / G] fp32 -> codes of the same shape, uint8, and scales [R, G].

    The number with the largest magnitude gets the code 0, which stands for -8 scales. So the scale is negative if this
    number is positive.
    """
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for shrink in SHRINKS:
        scales = _without_zeros((largest * (-shrink / MIDDLE)).bfloat16().float())
        codes = (groups / scales).round_().clamp_(-MIDDLE, MIDDLE - 1)
        errors = (codes * scales).sub_(groups).square_().sum(2, keepdim=True)
        if best is not None:
            is_better = errors < best[2]
            tried = zip((codes, scales, errors), best, strict=True)
            codes, scales, errors = (torch.where(is_better, new, old) for new, old in tried)
        best = codes, scales, errors
    assert best is not None
    return best[0].add_(MIDDLE).to(torch.uint8), best[1].squeeze(2)


def _without_zeros(scales: Tensor) -> Tensor:
    """Replace scales [...] of 0 by 1, in place. The codes of such a group are 0, and a division by 0 would give NaN."""
    return scales.masked_fill_(scales == 0, 1.0)


class OnlineFormat(CodesFormat):
    """Quantizes the weights while they are loaded.

    Attributes:
        stored: as in ``RowWriter``.
    """

    stored: str = ""

    def __init__(self, precision_of: Callable[[int], Precision]) -> None:
        """precision_of: inputs of a layer -> how it is quantized."""
        self._precision_of = precision_of

    def empty(self, layer: LinearSpec) -> Tensors:
        precision, device = self._precision_of(layer.in_features), layer.device
        outputs, inputs = sum(layer.sizes), layer.in_features
        dtype = {"fp8": FP8, "int8": torch.int8, "int4": torch.uint8}[precision.kind]
        is_packed = precision.kind == "int4"
        scales = torch.empty(outputs, inputs // (precision.group or inputs), device=device)
        return {
            "weight": torch.empty(outputs, inputs // 2 if is_packed else inputs, dtype=dtype, device=device),
            "scales": scales,
            **({"offsets": torch.empty_like(scales)} if precision.has_offsets else {}),
            **layer.empty_bias(),
        }

    def split(self, layer: LinearSpec, name: str, tensor: Tensor) -> Sequence[Tensor]:
        """Views of bias [O]. Codes are not in the checkpoint."""
        return tensor.split(layer.sizes) if name == "bias" else ()

    def codes(self, layer: LinearSpec, tensors: Tensors) -> Codes:
        packed, scales, offsets = tensors["weight"], tensors["scales"], tensors.get("offsets")
        if packed.dtype != torch.uint8:
            return Codes(packed, scales, offsets)
        return Codes(packed, scales, -MIDDLE * scales if offsets is None else offsets, 4)

    def tensors(self, layer: LinearSpec, codes: Codes) -> Tensors:
        tensors = {"weight": codes.packed, "scales": codes.scales.contiguous()}
        if codes.offsets is not None and self._precision_of(layer.in_features).has_offsets:
            tensors["offsets"] = codes.offsets.contiguous()
        return tensors

    def writers(self, layer: LinearSpec, tensors: Tensors) -> Mapping[str, Sequence[RowWriter]]:
        names = [name for name in ("weight", "scales", "offsets") if name in tensors]
        parts = zip(*(tensors[name].split(layer.sizes) for name in names), strict=True)
        return {"weight": [self._writer(layer, *part) for part in parts]}

    def _writer(self, layer: LinearSpec, packed: Tensor, scales: Tensor, offsets: Tensor | None = None) -> RowWriter:
        """Return the writer for codes [O, I] or, packed, [O, I / 2], and scales and offsets [O, G]."""

        def write(first: int, values: Tensor) -> None:
            """values: [R, I], or the bytes of rows."""
            for codes in self.quantized(values, layer.in_features):
                stop = first + len(codes.packed)
                packed[first:stop], scales[first:stop] = codes.packed, codes.scales
                if offsets is not None and codes.offsets is not None:
                    offsets[first:stop] = codes.offsets
                    scales[first:stop] += 0 * codes.offsets  # the scale is not finite if the offset is not
                first = stop

        num_bytes = sum(0 if tensor is None else tensor.nbytes for tensor in (packed, scales, offsets))
        placeholder = torch.empty((), dtype=layer.dtype, device=layer.device).expand(len(packed), layer.in_features)
        return RowWriter(placeholder, write, scales, num_bytes, stored=self.stored)

    def quantized(self, values: Tensor, inputs: int) -> Iterable[Codes]:
        """Quantize values [R, I], in parts."""
        precision = self._precision_of(inputs)
        parts = values.reshape(-1, inputs).split(max(PIECE_ELEMENTS // inputs, 1))
        return (quantize(part, precision) for part in parts)


def online_formats(
    quantization: OnlineQuantization,
) -> tuple[Callable[[str], LinearFormat], Callable[[bool], CodesFormat | None]]:
    """Return ``Placement.format_of`` and ``Placement.table_format``."""
    head = None if (precision := quantization.head) is None else OnlineFormat(lambda inputs: precision)
    by_part: dict[str, LinearFormat] = {"layer": OnlineFormat(quantization.layer), "unquantized": PLAIN}
    if head is not None:
        by_part["head"] = head
    return lambda name: by_part[quantization.part_of(name)], lambda is_head: head if is_head else None
