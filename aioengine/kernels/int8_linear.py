"""Matmul of int8 weights with activations that are quantized per token: x [T, I] -> [T, O].

Activations have 8 bits, or 16 bits on a CPU: x = scale (256 high + low) with int8 numbers ``high`` and ``low``, which
are multiplied as 2 T rows. With 16 bits, a result differs from the product in fp32 by about 0.00003 of its size, or
1/50 of the difference that rounding to bf16 makes.

A row has the same bits for every T. On a CPU with VNNI or AMX, oneDNN multiplies integers and adds them exactly. On
other CPUs its sums of two products may overflow 16 bits, so there we multiply the integers in fp32. Sums of up to
``EXACT_TERMS`` products are exact, and they are added in a fixed order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

from aioengine.kernels import linear
from aioengine.kernels.codes import MAX_INT8, Codes, copy_in_place
from aioengine.kernels.linear import PreparedMatmul
from aioengine.kernels.row_counts import Matmul, in_pieces

PART_BITS: Final = 8
PART: Final = 1 << PART_BITS
"""The high part of a 16-bit integer counts this many times."""
MAX_INT16: Final = MAX_INT8 * PART
"""The high part of this number is the largest int8."""
MIN_LARGEST: Final = 1e-10
"""Avoids a division by 0 if a token has only zeros."""
MIN_ROWS_ON_GPU: Final = 17
"""cuBLAS multiplies int8 only with more than 16 rows."""
EXACT_TERMS: Final = 1024
"""The sum of this many products of int8 numbers is exact in fp32."""
WIDE_OUTPUTS: Final = 256
"""Outputs whose weights are converted to fp32 at a time. They fit the cache."""
ROW_COUNTS: Final = tuple(count for count in linear.TILED_COUNTS if count <= 128)
"""Row counts of oneDNN, which compiles code for each. The sums of more rows do not fit the cache."""
ALWAYS_USED_ROWS: Final = 16
"""Row counts up to this one are used for results of any size."""
TRANSPOSED_ROWS: Final = 16
"""Up to this row count of integers, a matrix unit is faster if it multiplies the weight with x.t() (see ``linear``)."""
MAX_SUMS: Final = 4 << 20
"""Maximum size of a result with more rows than ``ALWAYS_USED_ROWS``. It saves memory in heads."""
SLOW_SUMS: Final = 256
"""With AMX, oneDNN takes up to 2,000 times as long for a result of up to this size, and for some single rows."""
ZERO: Final = 128
"""Without a matrix unit, oneDNN is fast only with unsigned activations: the numbers plus this one. With AMX it is fast
with signed ones, and it would round the large sums of unsigned ones.
"""


def _rounded(x: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return x [T, I] as integers up to ``largest`` [T, I] fp32, and the scale of each token [T, 1] fp32."""
    wide = x.to(torch.float32, memory_format=torch.contiguous_format)
    scales = wide.abs().amax(-1, keepdim=True).clamp_min_(MIN_LARGEST).div_(largest)
    return (wide / scales).round_(), scales


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [T, I] per token -> integers [T, I] int8 and scales [T, 1] fp32."""
    numbers, scales = _rounded(x, MAX_INT8)
    return numbers.to(torch.int8), scales


def quantize_to_16_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [T, I] per token -> high parts, then low parts [2 T, I] int8, and scales [T, 1] fp32."""
    rounded, scales = _rounded(x, MAX_INT16)
    numbers = rounded.to(torch.int16)
    high = (numbers + PART // 2).bitwise_right_shift_(PART_BITS)
    return torch.cat((high.to(torch.int8), numbers.to(torch.int8))), scales  # the conversion keeps the low 8 bits


def prepare(
    codes: Codes, bias: Tensor | None, *, activation_bits: Literal[8, 16] = 8, is_shared: bool = False
) -> PreparedMatmul[Codes]:
    """Prepare the matmul with int8 codes [O, I], which have a scale per output, and bias [O].

    activation_bits: 16 on a CPU where ``multiplies_exactly``. is_shared: the codes stay in memory, so they are not
    copied to oneDNN's layout. Matmuls of two rows then take 1.7 times as long, and matmuls of 64 rows 1.2 times.
    """
    weight, scales, is_on_cpu = codes.packed, codes.scales, codes.packed.device.type == "cpu"
    if is_on_cpu and not multiplies_exactly():
        multiply, restore = _widened(weight, scales.t()), lambda: codes
    elif is_on_cpu and not is_shared:
        packed, rest = torch.ops.onednn.qlinear_prepack(weight, None), codes._replace(packed=weight.new_empty(0))
        multiply_packed = _packed(packed, scales[:, 0].contiguous())
        multiply, restore = multiply_packed, lambda: rest._replace(packed=packed.to_dense().t().contiguous())
    else:
        multiply, restore = _unpacked(weight, scales.t()), lambda: codes
    wide_bias = None if bias is None else bias.float()

    def update(new: Codes, bias: Tensor | None) -> None:
        """Replace codes [O, I] and bias [O]."""
        copy_in_place((*codes, wide_bias), (*new, None if bias is None else bias.float()))

    def matmul(x: Tensor) -> Tensor:
        """[T, I] -> [T, O]."""
        if activation_bits == 8:
            integers, row_scales = quantize(x)
            sums = multiply(integers)
        else:
            integers, row_scales = quantize_to_16_bits(x)
            high, sums = multiply(integers).chunk(2)
            sums.add_(high, alpha=PART)
        if wide_bias is None:
            return sums.mul_(row_scales).to(x.dtype)
        return torch.addcmul(wide_bias, sums, row_scales).to(x.dtype)

    if is_on_cpu and multiplies_exactly():
        counts = _row_counts(len(scales), activation_bits // PART_BITS)
        return PreparedMatmul(in_pieces(matmul, counts), restore)
    return PreparedMatmul(matmul, restore, None if is_on_cpu else update)


def _row_counts(num_outputs: int, num_parts: int) -> tuple[int, ...]:
    """Return the row counts for a weight. num_parts: rows of integers for each row."""
    max_count, min_integer_rows = max(ALWAYS_USED_ROWS, MAX_SUMS // num_outputs), 0
    if linear.has_matrix_unit():
        min_integer_rows = max(2, SLOW_SUMS // num_outputs + 1)
    counts = tuple(count for count in ROW_COUNTS if count <= max_count)
    return tuple(count for count in counts if num_parts * count >= min_integer_rows) or counts


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
    """Return the matmul of integers [T, I] int8 with a weight in oneDNN's layout and its scales [O]."""
    multiply = torch.ops.onednn.qlinear_pointwise.default
    zeros = torch.zeros(len(scales), dtype=torch.int32)
    plain = (None, 1.0, 0, torch.float32, "none", [], "")  # no bias, nothing after the matmul
    is_signed = linear.has_matrix_unit()

    def matmul(x: Tensor) -> Tensor:
        """[T, I] -> [T, O] fp32."""
        if is_signed:
            return multiply(x, 1.0, 0, packed, scales, zeros, *plain)
        return multiply(x.view(torch.uint8) ^ ZERO, 1.0, ZERO, packed, scales, zeros, *plain)

    return matmul


def _widened(weight: Tensor, scales: Tensor) -> Matmul:
    """Return the matmul of integers [T, I] int8 with a weight [O, I] and its scales [1, O] in fp32."""

    def multiply(integers: Tensor, outputs: Tensor) -> Tensor:
        """Multiply integers [T, I] with the weights of some outputs [P, I] -> [T, P]."""
        terms = zip(integers.float().split(EXACT_TERMS, 1), outputs.split(EXACT_TERMS, 1), strict=True)
        first, *others = [functional.linear(part, numbers.float()) for part, numbers in terms]
        for sums in others:
            first += sums
        return first

    return lambda x: torch.cat([multiply(x, part) for part in weight.split(WIDE_OUTPUTS)], 1).mul_(scales)


def _unpacked(weight: Tensor, scales: Tensor) -> Matmul:
    """Return the matmul of integers [T, I] int8 with a weight [O, I] and its scales [1, O]."""
    transposed, is_on_gpu = weight.t(), weight.device.type != "cpu"
    transposed_rows = TRANSPOSED_ROWS if not is_on_gpu and linear.has_matrix_unit() else 0

    def matmul(x: Tensor) -> Tensor:
        """[T, I] -> [T, O] fp32."""
        num_rows = x.shape[0]
        if num_rows <= transposed_rows:
            columns = torch._int_mm(weight, x.t())  # pyright: ignore[reportPrivateImportUsage]
            return linear.transpose_back(columns.t()) * scales
        if is_on_gpu and num_rows < MIN_ROWS_ON_GPU:
            x = functional.pad(x, (0, 0, 0, MIN_ROWS_ON_GPU - num_rows))
        return torch._int_mm(x, transposed)[:num_rows] * scales  # pyright: ignore[reportPrivateImportUsage]

    return matmul
