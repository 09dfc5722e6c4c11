"""Matmul of int8 weights with activations that are quantized per token: x [T, D] -> [T, O].

A row has the same bits for every T. On a CPU with VNNI or AMX, oneDNN multiplies integers and adds them exactly. On
other CPUs its sums of two products may overflow 16 bits, so there we multiply the integers in fp32. Sums of up to
``EXACT_TERMS`` products are exact, and they are added in a fixed order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.nn import functional

from aioengine.kernels import linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from aioengine.kernels.linear import Matmul

MAX_INT8: Final = 127
MIN_ROWS_ON_GPU: Final = 17
"""cuBLAS multiplies int8 only with more than 16 rows."""
EXACT_TERMS: Final = 1024
WIDE_OUTPUTS: Final = 256
"""Outputs whose weights are converted to fp32 at a time. They fit the cache."""
ROW_COUNTS: Final = tuple(count for count in linear.TILED_COUNTS if count <= 128)
"""Row counts of oneDNN, which compiles code for each. The sums of more rows do not fit the cache."""
ZERO: Final = 128
"""oneDNN takes unsigned activations: the numbers plus this one."""


class PreparedIntegers(NamedTuple):
    """A product [T, D] -> [T, O], and a function that returns its weight [O, D] int8."""

    matmul: Matmul
    restore: Callable[[], Tensor]


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [T, D] per token -> integers [T, D] int8 and scales [T, 1] fp32."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp_min_(1e-10).div_(MAX_INT8)
    return (wide / scales).round_().to(torch.int8), scales


def prepare(weight: Tensor, scales: Tensor, bias: Tensor | None) -> PreparedIntegers:
    """Prepare the product with weight [O, D] int8, scales [O, 1] fp32 and bias [O]."""
    is_packed = weight.device.type == "cpu" and multiplies_exactly()
    if is_packed:
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        multiply, restore = _packed(packed, scales[:, 0].contiguous()), lambda: packed.to_dense().t()
    else:
        by_device = _widened if weight.device.type == "cpu" else _by_library
        multiply, restore = by_device(weight, scales.t()), lambda: weight
    wide_bias = None if bias is None else bias.float()

    def matmul(x: Tensor) -> Tensor:
        """[T, D] -> [T, O]."""
        integers, row_scales = quantize(x)
        sums = multiply(integers)
        if wide_bias is None:
            return sums.mul_(row_scales).to(x.dtype)
        return torch.addcmul(wide_bias, sums, row_scales).to(x.dtype)

    return PreparedIntegers(linear.in_pieces(matmul, ROW_COUNTS) if is_packed else matmul, restore)


@lru_cache(maxsize=1)
def multiplies_exactly() -> bool:
    """Return whether oneDNN's sums of large integers are exact on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    weight = torch.tensor([[127, -128], [127, 127]], dtype=torch.int8).repeat(8, 64)
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    integers = torch.tensor([[127, 127], [-127, 127]], dtype=torch.int8).repeat(2, 64)
    expected = integers.float() @ weight.float().t()
    return torch.equal(_packed(packed, torch.ones(16))(integers), expected)


def _packed(packed: Tensor, scales: Tensor) -> Matmul:
    """Return the product of integers [T, D] int8 with a weight in oneDNN's layout and its scales [O]."""
    multiply = torch.ops.onednn.qlinear_pointwise.default
    zeros = torch.zeros(len(scales), dtype=torch.int32)
    plain = (None, 1.0, 0, torch.float32, "none", [], "")  # no bias, nothing after the product

    def matmul(x: Tensor) -> Tensor:
        """[T, D] -> [T, O] fp32."""
        return multiply(x.view(torch.uint8) ^ ZERO, 1.0, ZERO, packed, scales, zeros, *plain)

    return matmul


def _widened(weight: Tensor, scales: Tensor) -> Matmul:
    """Return the product of integers [T, D] int8 with a weight [O, D] and its scales [1, O] in fp32."""

    def multiply(integers: Tensor, outputs: Tensor) -> Tensor:
        """Multiply integers [T, D] with the weights of some outputs [P, D] -> [T, P]."""
        terms = zip(integers.float().split(EXACT_TERMS, 1), outputs.split(EXACT_TERMS, 1), strict=True)
        first, *others = [functional.linear(part, numbers.float()) for part, numbers in terms]
        for sums in others:
            first += sums
        return first

    return lambda x: torch.cat([multiply(x, part) for part in weight.split(WIDE_OUTPUTS)], 1).mul_(scales)


def _by_library(weight: Tensor, scales: Tensor) -> Matmul:
    """Return the product of integers [T, D] int8 with a weight [O, D] and its scales [1, O] on a GPU."""
    transposed = weight.t()

    def matmul(x: Tensor) -> Tensor:
        """[T, D] -> [T, O] fp32."""
        num_rows = x.shape[0]
        if num_rows < MIN_ROWS_ON_GPU:
            x = functional.pad(x, (0, 0, 0, MIN_ROWS_ON_GPU - num_rows))
        return torch._int_mm(x, transposed)[:num_rows] * scales  # pyright: ignore[reportPrivateImportUsage]

    return matmul
