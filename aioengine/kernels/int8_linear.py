"""Matmul of int8 weights with activations that are quantized per token: x [T, I] -> [T, O].

Activations become integers of 8 bits, or of 14 or 16 bits on a CPU. Integers with more bits than oneDNN multiplies
exactly (``part_bits``) are split into two parts: x = scale (2 ** bits high + low). The parts are multiplied as 2 T
rows. With 14 bits, a result differs from the product in fp32 by about 0.0001 of its size, with 16 bits by about
0.00003.

A row has the same bits for every T. On a CPU, oneDNN adds the products of integers exactly: with VNNI or AMX those of 8
bits. On other CPUs its sums of two products have 16 bits. These hold products of activations of 7 bits (``part_bits``).
"""

from __future__ import annotations

from functools import cache
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

from aioengine.kernels import linear
from aioengine.kernels.codes import MAX_INT8, Codes, copy_in_place
from aioengine.kernels.linear import PreparedMatmul
from aioengine.kernels.row_counts import Matmul, in_pieces

MIN_LARGEST: Final = 1e-10
"""Avoids a division by 0 if a token has only zeros."""
MIN_ROWS_ON_GPU: Final = 17
"""cuBLAS multiplies int8 only with more than 16 rows."""
ONEDNN_COUNTS: Final = tuple(count for count in linear.TILED_COUNTS if count <= 128)
"""Row counts of oneDNN, which compiles code for each. The sums of more rows do not fit the cache."""
ALWAYS_USED_ROWS: Final = 16
"""Row counts up to this one are used for results of any size."""
TRANSPOSED_ROWS: Final = 16
"""Up to this row count of integers, a matrix unit is faster if it multiplies the weight with x.t() (see ``linear``)."""
MAX_SUMS: Final = 4 << 20
"""Maximum size of a result with more rows than ``ALWAYS_USED_ROWS``. It saves memory in heads."""
SLOW_SUMS: Final = 256
"""With AMX, oneDNN takes up to 2,000 times as long for a result of up to this size, and for some single rows."""


def _rounded(x: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return x [T, I] as integers up to ``largest`` [T, I] fp32, and the scale of each token [T, 1] fp32."""
    wide = x.to(torch.float32, memory_format=torch.contiguous_format)
    scales = wide.abs().amax(-1, keepdim=True).clamp_min_(MIN_LARGEST).div_(largest)
    return (wide / scales).round_(), scales


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [T, I] per token -> integers [T, I] int8 and scales [T, 1] fp32."""
    numbers, scales = _rounded(x, MAX_INT8)
    return numbers.to(torch.int8), scales


def quantize_in_parts(x: Tensor, largest: int, bits: int) -> tuple[Tensor, Tensor]:
    """Quantize x [T, I] per token -> high parts, then low parts of ``bits`` bits [2 T, I] int8, and scales [T, 1] fp32.

    largest: the largest integer.
    """
    rounded, scales = _rounded(x, largest)
    numbers = rounded.to(torch.int16)
    high = (numbers + (1 << bits - 1)).bitwise_right_shift_(bits)
    low = numbers if bits == 8 else numbers - (high << bits)  # the conversion to int8 keeps the low 8 bits
    return torch.cat((high.to(torch.int8), low.to(torch.int8))), scales


def prepare(
    codes: Codes, bias: Tensor | None, *, activation_bits: Literal[8, 16] = 8, is_shared: bool = False
) -> PreparedMatmul[Codes]:
    """Prepare the matmul with int8 codes [O, I], which have a scale per output, and bias [O].

    activation_bits: 16, or 14 where parts have 7 bits, on a CPU.
    is_shared: the codes stay in memory. With parts of 8 bits, they are then not copied to oneDNN's layout. Matmuls of
    two rows take 1.7 times as long, and matmuls of 64 rows 1.2 times.
    """
    weight, scales, is_on_cpu = codes.packed, codes.scales, codes.packed.device.type == "cpu"
    bits = part_bits() if is_on_cpu else 8
    num_parts = 1 if bits == activation_bits else 2
    if is_on_cpu and not (is_shared and bits == 8):
        packed, rest = torch.ops.onednn.qlinear_prepack(weight, None), codes._replace(packed=weight.new_empty(0))
        multiply_integers = _onednn_matmul(packed, scales[:, 0].contiguous(), bits)
        multiply, restore = multiply_integers, lambda: rest._replace(packed=packed.to_dense().t().contiguous())
    else:
        multiply, restore = _unpacked(weight, scales.t()), lambda: codes
    wide_bias = None if bias is None else bias.float()
    largest = MAX_INT8 if activation_bits == 8 else (1 << bits - 1) - 1 << bits  # its high part is the largest one

    def update(new: Codes, bias: Tensor | None) -> None:
        """Replace codes [O, I] and bias [O]."""
        copy_in_place((*codes, wide_bias), (*new, None if bias is None else bias.float()))

    def matmul(x: Tensor) -> Tensor:
        """[T, I] -> [T, O]."""
        if num_parts == 1:
            integers, row_scales = quantize(x)
            sums = multiply(integers)
        else:
            integers, row_scales = quantize_in_parts(x, largest, bits)
            high, sums = multiply(integers).chunk(2)
            sums.add_(high, alpha=1 << bits)
        if wide_bias is None:
            return sums.mul_(row_scales).to(x.dtype)
        return torch.addcmul(wide_bias, sums, row_scales).to(x.dtype)

    if is_on_cpu:
        return PreparedMatmul(in_pieces(matmul, _row_counts(len(scales), num_parts)), restore)
    return PreparedMatmul(matmul, restore, update)


def _row_counts(num_outputs: int, num_parts: int) -> tuple[int, ...]:
    """Return the row counts for a weight. num_parts: rows of integers for each row."""
    max_count = max(ALWAYS_USED_ROWS, MAX_SUMS // num_outputs)
    min_integer_rows = max(2, SLOW_SUMS // num_outputs + 1) if linear.has_matrix_unit() else 0
    counts = tuple(count for count in ONEDNN_COUNTS if count <= max_count)
    return tuple(count for count in counts if num_parts * count >= min_integer_rows) or counts


@cache
def part_bits() -> int:
    """Return how many bits activations may have so that oneDNN's sums are exact on this CPU.

    8 or 7; 0: they are exact for no number of bits, or torch has no oneDNN.
    """
    if not torch.backends.mkldnn.is_available():
        return 0
    weight = torch.tensor([[127, -128], [127, 127]], dtype=torch.int8).repeat(8, 64)
    packed = torch.ops.onednn.qlinear_prepack(weight, None)
    for bits in (8, 7):
        largest = (1 << bits - 1) - 1
        integers = torch.tensor([[largest, largest], [-largest, largest]], dtype=torch.int8).repeat(2, 64)
        if torch.equal(_onednn_matmul(packed, torch.ones(16), bits)(integers), integers.float() @ weight.float().t()):
            return bits
    return 0


def _onednn_matmul(packed: Tensor, scales: Tensor, bits: int) -> Matmul:
    """Return the matmul of integers [T, I] int8 of ``bits`` bits with a weight in oneDNN's layout and its scales [O].

    Without a matrix unit, oneDNN is fast only with unsigned numbers. With AMX it is fast with signed ones, and it would
    round the large sums of unsigned ones.
    """
    multiply = torch.ops.onednn.qlinear_pointwise.default
    zeros = torch.zeros(len(scales), dtype=torch.int32)
    plain = (None, 1.0, 0, torch.float32, "none", [], "")  # no bias, nothing after the matmul
    is_signed, zero = linear.has_matrix_unit(), 1 << bits - 1

    def matmul(x: Tensor) -> Tensor:
        """[T, I] -> [T, O] fp32."""
        if is_signed:
            return multiply(x, 1.0, 0, packed, scales, zeros, *plain)
        unsigned = x.view(torch.uint8) ^ zero if bits == 8 else (x + zero).view(torch.uint8)
        return multiply(unsigned, 1.0, zero, packed, scales, zeros, *plain)

    return matmul


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
