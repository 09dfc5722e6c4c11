"""Products of 8-bit weights by the 8-bit instructions of tensor cores (Hopper): x [T, I], weight [O, I] -> [T, O].

The inputs of these instructions must have 8 bits too. So for few rows, each input is the sum of two 8-bit numbers, a
pair, which is nearly exact. The weight is multiplied as it is stored: converting it to bf16 in registers, as
``code_linear`` does, takes longer than reading it. Each row has one scale, P is the number of padded rows.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.codes import FP8, FP8_MAX
from aioengine.kernels.triton.code_linear import DeviceCodes
from aioengine.kernels.triton.dependent import wait_and_start_next, wait_between_products
from aioengine.kernels.triton.launcher import KernelLauncher, alignments, next_power_of_2, options
from aioengine.kernels.triton.skinny_linear import with_other_splits

LARGEST = tl.constexpr(FP8_MAX)
MAX_FP8_PAIRS = 64
MAX_FP8_ROWS = 128
"""With more rows than ``MAX_FP8_PAIRS``, the inputs of fp8 weights are rounded to fp8."""
MAX_INT8_PAIRS = 256
MIN_COLUMNS, MAX_COLUMNS = 16, 128
"""8-bit rows of a program."""
OUTPUTS = 64
FEW_OUTPUTS = 4096
MANY_OUTPUTS = 16_384
BLOCK = 128
PADDED_ROWS = 4
FP8_LOW = tl.constexpr(32.0)
INT8_LOW = tl.constexpr(254.0)
"""The second number of a pair is multiplied by this."""


@triton.jit(do_not_specialize=["num_padded"])
def _quantize_rows_kernel(
    x: tl.tensor, numbers: tl.tensor, scales: tl.tensor, num_padded: tl.tensor,
    SIZE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr,
) -> None:  # fmt: skip
    """LOW: of pairs; 0: no pairs."""
    wait_between_products()
    narrow = numbers.dtype.element_ty
    row, groups = tl.program_id(0).to(tl.int64), tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, WIDTH)[None, :]
    inside = columns < SIZE
    values = tl.load(x + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(values), 1), 1e-12)
    has_nan = tl.max((values != values).to(tl.int32), 1) > 0
    if LOW == 0:
        scale = largest / LARGEST
        tl.store(numbers + row * SIZE + columns, (values / scale[:, None]).to(narrow), mask=inside)
    else:
        if narrow == tl.int8:
            scale = largest / 127.0
            values /= scale[:, None]
            high = tl.floor(values + 0.5)
            low = tl.floor((values - high) * LOW + 0.5)
        else:  # the scale is a power of 2, so that the largest number is between 128 and 256
            scale = ((largest.to(tl.int32, bitcast=True) >> 23) - 7 << 23).to(tl.float32, bitcast=True)
            values /= scale[:, None]
            bits = values.to(tl.int32, bitcast=True)  # ptxas 13.0 fails to convert fp8 that it has just rounded
            high = (bits + 0x80000 & ~0xFFFFF).to(tl.float32, bitcast=True)  # 4 significant bits, as fp8 has
            low = (values - high) * LOW
        tl.store(numbers + 2 * row * SIZE + columns, high.to(narrow), mask=inside)
        tl.store(numbers + (2 * row + 1) * SIZE + columns, low.to(narrow), mask=inside)
    scale = tl.where(has_nan, float("nan"), scale)  # int8 has no NaN
    tl.store(scales + groups.to(tl.int64) * num_padded + row, scale, mask=groups * GROUP < SIZE)


_quantize_rows = KernelLauncher(_quantize_rows_kernel)


def quantize_rows(x: Tensor, group: int, dtype: torch.dtype = FP8, low: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return x [T, I] as numbers [P, I], and their scales [G, P] fp32, one for each ``group`` inputs of a row.

    P is the next multiple of ``PADDED_ROWS``, as torch's products with several scales per row need; the last P - T rows
    are uninitialized. group: a power of two, or I.

    low: return pairs [2 P, I] instead. Row 2 r, and row 2 r + 1 divided by this, add to row r of x. Errors are at most
    2 ** -15 of the largest number of the row. In fp8, bf16 numbers of at least 2 ** -13 of it have no error.
    """
    num_rows, size = x.shape
    num_padded = -(-num_rows // PADDED_ROWS) * PADDED_ROWS
    numbers = torch.empty((num_padded * (2 if low else 1), size), dtype=dtype, device=x.device)
    scales = torch.empty((-(-size // group), num_padded), dtype=torch.float32, device=x.device)
    sizes = size, group, next_power_of_2(len(scales)), next_power_of_2(group), low
    key = (x.dtype, dtype, sizes, *alignments(x))
    _quantize_rows((num_rows, 1, 1), key, (x, numbers, scales, num_padded, *sizes), options(8 if size > 2048 else 4))
    return numbers, scales


@triton.jit(do_not_specialize=["num_rows", "num_numbers"])
def _matmul_kernel(
    x: tl.tensor, x_scales: tl.tensor, weight: tl.tensor, scales: tl.tensor, bias: tl.tensor, partials: tl.tensor,
    num_done: tl.tensor, out: tl.tensor, num_rows: tl.tensor, num_numbers: tl.tensor, num_outputs: tl.tensor,
    SIZE: tl.constexpr, GROUP: tl.constexpr, LOW: tl.constexpr, COLUMNS: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """LOW: of pairs; 0: the inputs are no pairs."""
    split, tile = tl.program_id(1), tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    first = split * (SIZE // SPLITS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    first_column = tl.program_id(2) * COLUMNS
    columns = tl.minimum(first_column + tl.arange(0, COLUMNS), num_numbers - 1)[None, :]
    clamped = tl.minimum(outputs, num_outputs - 1)
    inner = first + tl.arange(0, BLOCK)
    line_pointers = weight + clamped.to(tl.int64) * SIZE + inner[None, :]
    vectors = x + columns * SIZE + inner[:, None]
    wait_and_start_next()
    total = tl.zeros((OUTPUTS, COLUMNS), tl.float32)
    for start in tl.range(0, SIZE // SPLITS, BLOCK, num_stages=STAGES):
        products = tl.dot(tl.load(line_pointers + start), tl.load(vectors + start)).to(tl.float32)
        if GROUP < SIZE:
            products *= tl.load(scales + (first + start) // GROUP * num_outputs + clamped)
        total += products  # in fp32: the instruction for fp8 adds with fewer bits
    is_last = True
    if SPLITS > 1:
        total, is_last = with_other_splits(total, partials, num_done, tile, split, SPLITS)
    if is_last:
        if LOW > 0:
            high, low = tl.split(tl.reshape(total, (OUTPUTS, COLUMNS // 2, 2)))
            result, rows = high + low / LOW, (first_column // 2 + tl.arange(0, COLUMNS // 2))[None, :]
        else:
            result, rows = total, first_column + tl.arange(0, COLUMNS)[None, :]
        if GROUP == SIZE:
            result *= tl.load(scales + clamped)
        result *= tl.load(x_scales + rows, mask=rows < num_rows, other=0.0)
        inside = (rows < num_rows) & (outputs < num_outputs)
        if bias is not None:
            result += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)
        tl.store(out + rows * num_outputs + outputs, result.to(out.dtype.element_ty), mask=inside)


_matmul = KernelLauncher(_matmul_kernel)


@lru_cache(maxsize=1024)
def shape_of_programs(num_outputs: int, size: int, group: int, columns: int) -> tuple[int, int, int]:
    """Return (inputs per block, splits, stages). Measured on an H200 for the layers of an 8B model."""
    is_narrow, is_least, is_large = columns <= MAX_COLUMNS // 2, columns == MIN_COLUMNS, num_outputs >= MANY_OUTPUTS
    if is_least and num_outputs <= FEW_OUTPUTS and size % (4 * BLOCK) == 0:
        return BLOCK, 4, 4
    splits = 2 if num_outputs <= FEW_OUTPUTS and size % (2 * BLOCK) == 0 else 1
    if is_narrow and group == size and (is_least or not is_large) and size % (2 * BLOCK * splits) == 0:
        return 2 * BLOCK, splits, 5
    return BLOCK, splits, 5 if not is_large else 6 if columns == MAX_COLUMNS // 2 else 4


def serves(codes: DeviceCodes) -> bool:
    """Return whether ``matmul`` supports these codes."""
    has_blocks = codes.shape[1] % BLOCK == 0 and codes.group % BLOCK == 0
    return codes.bits == 8 and has_blocks and codes.offsets is None


def is_fast(codes: DeviceCodes, x: Tensor) -> bool:
    """Return whether ``matmul`` is faster than other products, and x [T, I] has no more bits than a pair."""
    if codes.numbers.dtype != FP8:
        return x.dtype != torch.float32 and 1 < len(x) <= MAX_INT8_PAIRS
    return x.dtype == torch.bfloat16 and len(x) <= (MAX_FP8_ROWS if codes.shape[0] <= FEW_OUTPUTS else MAX_FP8_PAIRS)


def matmul(x: Tensor, codes: DeviceCodes, bias: Tensor | None, num_done: Tensor) -> Tensor:
    """x [T, I], codes [O, I] that ``serves`` accepts, bias [O] -> [T, O].

    num_done: [code_linear.num_tiles] int32 zeros, which are zeros again after.
    """
    num_outputs, size = codes.shape
    num_rows, low = len(x), INT8_LOW.value
    if codes.numbers.dtype == FP8:
        low = FP8_LOW.value if num_rows <= MAX_FP8_PAIRS else 0.0
    numbers, x_scales = quantize_rows(x, size, codes.numbers.dtype, low)
    num_numbers = num_rows * 2 if low else num_rows
    columns = min(max(next_power_of_2(num_numbers), MIN_COLUMNS), MAX_COLUMNS)
    block, splits, stages = shape_of_programs(num_outputs, size, codes.group, columns)
    grid = -(-num_outputs // OUTPUTS), splits, -(-num_numbers // columns)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    num_partials = 1 if splits == 1 else grid[0] * splits * grid[2] * OUTPUTS * columns
    partials = torch.empty(num_partials, dtype=torch.float32, device=x.device)
    sizes = size, codes.group, low, columns, OUTPUTS, block, splits, stages
    tensors = numbers, x_scales, codes.numbers, codes.scales, bias, partials, num_done, out
    bias_dtype = None if bias is None else bias.dtype
    key = (x.dtype, numbers.dtype, num_outputs, sizes, bias_dtype, *alignments(codes.numbers))
    _matmul(grid, key, (*tensors, num_rows, len(numbers), num_outputs, *sizes), options(4))
    return out
