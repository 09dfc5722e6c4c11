"""Products of 8-bit weights by the 8-bit instructions of tensor cores (Hopper): x [T, I], weight [O, I] -> [T, O].

The inputs of these instructions must have 8 bits too. So for few rows, each input is the sum of two 8-bit numbers, a
pair, which is nearly exact. The weight is multiplied as it is stored: converting it to bf16 in registers, as
``code_linear`` does, takes longer than reading it.

Programs: each computes ``LINES`` lines of the weight times some rows, over one split of the inputs. If the weight has
one scale per output, it converts up to ``CONVERTING_ROWS`` rows itself. Otherwise a kernel converts them before.

Sums: tensor cores add the products of a block of inputs, and blocks are added in fp32 from first to last. Then splits
are added in order. Blocks and splits depend on the number of rows, so the bits do too.

x_rows: rows of 8-bit numbers. A row of pairs is two of them: its high numbers, and its low numbers. P padded rows.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from aioengine.kernels.codes import FP8, FP8_MAX
from aioengine.kernels.triton.activation import activated
from aioengine.kernels.triton.dependent import wait_and_start_next, wait_between_products
from aioengine.kernels.triton.device_codes import DeviceCodes
from aioengine.kernels.triton.launcher import PROCESSORS, alignments, dtypes, kernel, next_power_of_2, options
from aioengine.kernels.triton.skinny_linear import FEW_OUTPUTS, MANY_OUTPUTS, with_other_splits

LARGEST = tl.constexpr(FP8_MAX)
MAX_FP8_PAIRS, MAX_FP8_ROWS = 64, 128
"""Maximum rows of pairs, and of inputs that are rounded to fp8, with fp8 weights."""
MAX_INT8_PAIRS = 256
"""Maximum rows with int8 weights."""
CONVERTING_ROWS = 8
"""Up to this number of rows, programs may convert the inputs."""
MAX_X_ROWS = 128
"""8-bit rows of a program."""
LINES = 64
"""Lines of the weight of a program."""
BLOCK = 128
"""Inputs of the smallest block."""
ROW_UNIT = 4
"""torch's products with several scales per row need a multiple of this many rows."""
FP8_LOW_FACTOR, INT8_LOW_FACTOR = 32.0, 254.0
"""The low number of a pair stands for itself divided by this."""


@triton.jit
def _largest(values: tl.tensor) -> tl.tensor:
    """Return the largest magnitude of each row [A, B], at least 1e-12; NaN if there is one in the row."""
    bits = tl.max(tl.abs(values).to(tl.int32, bitcast=True), 1)  # NaN is the largest of these integers
    return tl.maximum(bits, 0x2B8CBCCC).to(tl.float32, bitcast=True)


@triton.jit
def _as_pairs(
    values: tl.tensor, narrow: tl.constexpr, LOW_FACTOR: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return values [A, B] fp32 as pairs: high numbers and low numbers [A, B], and the scale of each row [A]."""
    largest = _largest(values)
    if narrow == tl.int8:
        scale = largest / 127.0
        values /= scale[:, None]
        high = tl.floor(values + 0.5)
        low = tl.floor((values - high) * LOW_FACTOR + 0.5)
    else:  # the scale is a power of 2, so that the largest number is between 128 and 256
        exponent = largest.to(tl.int32, bitcast=True) >> 23
        scale = (exponent - 7 << 23).to(tl.float32, bitcast=True) + 0.0 * largest
        values *= (261 - exponent << 23).to(tl.float32, bitcast=True)[:, None]  # exactly 1 / scale
        bits = values.to(tl.int32, bitcast=True)  # ptxas 13.0 fails to convert fp8 that it has just rounded
        high = (bits + 0x80000 & ~0xFFFFF).to(tl.float32, bitcast=True)  # 4 significant bits, as fp8 has
        low = (values - high) * LOW_FACTOR
    return high.to(narrow), low.to(narrow), scale


@kernel(do_not_specialize=["num_padded"])
def _quantize_rows_kernel(
    x: tl.tensor, numbers: tl.tensor, scales: tl.tensor, num_padded: tl.tensor,
    SIZE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, LOW_FACTOR: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ``quantize_rows``, a row per program. LOW_FACTOR: of pairs; 0: no pairs."""
    wait_between_products()
    narrow = numbers.dtype.element_ty
    row, groups = tl.program_id(0).to(tl.int64), tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, WIDTH)[None, :]
    inside = columns < SIZE
    values = tl.load(x + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    targets = numbers + row * SIZE + columns
    if LOW_FACTOR == 0:
        scale = _largest(values) / LARGEST
        tl.store(targets, (values / scale[:, None]).to(narrow), mask=inside)
    else:
        high, low, scale = _as_pairs(values, narrow, LOW_FACTOR)
        tl.store(targets, high, mask=inside)
        tl.store(targets + num_padded.to(tl.int64) * SIZE, low, mask=inside)
    tl.store(scales + groups.to(tl.int64) * num_padded + row, scale, mask=groups * GROUP < SIZE)


def quantize_rows(x: Tensor, group: int, dtype: torch.dtype = FP8, low_factor: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return x [T, I] as numbers [P, I], and their scales [G, P] fp32, one for each ``group`` inputs of a row.

    P is the next multiple of ``ROW_UNIT``; the last P - T rows are uninitialized. group: a power of two, or I.

    low_factor: return pairs [2 P, I] instead. Row r, and row P + r divided by this, add to row r of x. Errors are at
    most 2 ** -15 of the largest number of the row. In fp8, bf16 numbers of at least 2 ** -13 of it have no error.
    """
    num_rows, size = x.shape
    num_padded = -(-num_rows // ROW_UNIT) * ROW_UNIT
    numbers = torch.empty((num_padded * (2 if low_factor else 1), size), dtype=dtype, device=x.device)
    scales = torch.empty((-(-size // group), num_padded), dtype=torch.float32, device=x.device)
    sizes = size, group, next_power_of_2(len(scales)), next_power_of_2(group), low_factor
    key, arguments = (x.dtype, dtype, sizes, *alignments(x)), (x, numbers, scales, num_padded, *sizes)
    _quantize_rows_kernel((num_rows, 1, 1), key, arguments, options(8 if size > 2048 else 4))
    return numbers, scales


@triton.jit
def _rows_of(pairs: tl.tensor, LOW_FACTOR: tl.constexpr) -> tl.tensor:
    """Return the sums [LINES, ROWS] of pairs [LINES, 2 ROWS]: first the high numbers, then the low numbers."""
    ROWS: tl.constexpr = pairs.shape[1] // 2
    high, low = tl.split(tl.permute(tl.reshape(pairs, (pairs.shape[0], 2, ROWS)), (0, 2, 1)))
    return high + low / LOW_FACTOR


@triton.jit
def _finished(
    total: tl.tensor, scales: tl.tensor, bias: tl.tensor, lines: tl.tensor, SCALES: tl.constexpr
) -> tl.tensor:
    """Multiply the sums [LINES, ROWS] by the scales of their lines if there are ``SCALES``, and add the bias."""
    if SCALES:
        total *= tl.load(scales + lines)
    if bias is not None:
        total += tl.load(bias + lines).to(tl.float32)
    return total


@kernel(do_not_specialize=["num_rows", "num_padded"])
def _matmul_kernel(
    x: tl.tensor, x_scales: tl.tensor, weight: tl.tensor, scales: tl.tensor, bias: tl.tensor, partials: tl.tensor,
    num_done: tl.tensor, out: tl.tensor, num_rows: tl.tensor, num_padded: tl.tensor, num_lines: tl.tensor,
    SIZE: tl.constexpr, GROUP: tl.constexpr, LOW_FACTOR: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply the result of ``quantize_rows``. LOW_FACTOR: of pairs; 0: no pairs.

    GATED: half of the lines of a program are gates, and half are the lines that they multiply.
    """
    HALF: tl.constexpr = LINES // 2
    split, tile = tl.program_id(1), tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    first, first_row = split * (SIZE // SPLITS), tl.program_id(2) * ROWS
    lines = tl.program_id(0) * LINES + tl.arange(0, LINES)
    if GATED:
        places = tl.arange(0, LINES)
        lines = tl.program_id(0) * HALF + places % HALF + places // HALF * (num_lines // 2)
    clamped = tl.minimum(lines, num_lines - 1)[:, None]
    x_rows = tl.arange(0, 2 * ROWS if LOW_FACTOR > 0 else ROWS)
    x_rows = tl.minimum(first_row + x_rows % ROWS, num_rows - 1) + x_rows // ROWS * num_padded
    columns = first + tl.arange(0, BLOCK)
    line_pointers = weight + clamped.to(tl.int64) * SIZE + columns[None, :]
    x_pointers = x + x_rows[None, :] * SIZE + columns[:, None]
    wait_and_start_next()
    total = tl.zeros((LINES, x_rows.shape[0]), tl.float32)
    for start in tl.range(0, SIZE // SPLITS, BLOCK, num_stages=STAGES):
        products = tl.dot(tl.load(line_pointers + start), tl.load(x_pointers + start)).to(tl.float32)
        if GROUP < SIZE:
            products *= tl.load(scales + (first + start) // GROUP * num_lines + clamped)
        total += products  # in fp32: the instruction for fp8 adds with fewer bits
    total, all_done = with_other_splits(total, partials, num_done, tile, split, SPLITS)
    if all_done:
        rows = (first_row + tl.arange(0, ROWS))[None, :]
        result = _rows_of(total, LOW_FACTOR) if LOW_FACTOR > 0 else total
        result *= tl.load(x_scales + rows, mask=rows < num_rows, other=0.0)
        result = _finished(result, scales, bias, clamped, GROUP == SIZE)
        num_outputs, outputs = num_lines, lines[:, None]
        if GATED:
            num_outputs, outputs = num_lines // 2, (tl.program_id(0) * HALF + tl.arange(0, HALF))[:, None]
            gate, up = tl.split(tl.permute(tl.reshape(result, (2, HALF, ROWS)), (1, 2, 0)))
            result = activated(gate, up, out.dtype.element_ty)
        inside = (rows < num_rows) & (outputs < num_outputs)
        tl.store(out + rows * num_outputs + outputs, result.to(out.dtype.element_ty), mask=inside)


@kernel(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, bias: tl.tensor, partials: tl.tensor, num_done: tl.tensor,
    out: tl.tensor, num_rows: tl.tensor, num_outputs: tl.tensor,
    SIZE: tl.constexpr, LOW_FACTOR: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr,
) -> None:  # fmt: skip
    """Convert blocks of x to pairs, with a scale for each row of a block, and multiply them. GATED: a program also
    computes the outputs that its gates multiply.

    The weight is loaded by TMA. Other loads of later blocks would have to end before converted numbers are multiplied.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    first, line = split * (SIZE // SPLITS), tile * LINES
    outputs, rows = line + tl.arange(0, LINES)[:, None], tl.arange(0, ROWS)
    x_pointers = x + tl.minimum(rows, num_rows - 1)[:, None] * SIZE + first + tl.arange(0, BLOCK)[None, :]
    total, ups = tl.zeros((LINES, ROWS), tl.float32), tl.zeros((LINES, ROWS), tl.float32)
    for start in tl.range(0, SIZE // SPLITS, BLOCK, num_stages=STAGES):
        part = weight.load([line, first + start])
        if GATED:
            up_part = weight.load([num_outputs + line, first + start])
        values = tl.zeros((ROWS, BLOCK), x.dtype.element_ty)
        if num_rows > 0:  # always true: because of this branch, the loop loads weights, but not x, before it waits
            if start == 0:
                wait_and_start_next()
            values = tl.load(x_pointers + start)
        high, low, scale = _as_pairs(values.to(tl.float32), weight.dtype, LOW_FACTOR)
        numbers = tl.trans(tl.reshape(tl.permute(tl.join(high, low), (2, 0, 1)), (2 * ROWS, BLOCK)))
        total += _rows_of(tl.dot(part, numbers).to(tl.float32), LOW_FACTOR) * scale[None, :]
        if GATED:
            ups += _rows_of(tl.dot(up_part, numbers).to(tl.float32), LOW_FACTOR) * scale[None, :]
    total, all_done = with_other_splits(total, partials, num_done, tile, split, SPLITS)
    if all_done:
        lines, inside = tl.minimum(outputs, num_outputs - 1), (rows[None, :] < num_rows) & (outputs < num_outputs)
        result = _finished(total, scales, bias, lines, True)
        if GATED:
            result = activated(result, _finished(ups, scales, bias, num_outputs + lines, True), out.dtype.element_ty)
        tl.store(out + rows[None, :] * num_outputs + outputs, result.to(out.dtype.element_ty), mask=inside)


@lru_cache(maxsize=1024)
def shape_of_programs(num_outputs: int, size: int, group: int, rows: int) -> tuple[int, int, int]:
    """Return (inputs per block, splits, stages). Measured on an H200 for the layers of an 8B model."""
    has_few_rows, is_large = rows <= MAX_X_ROWS // 4, num_outputs >= MANY_OUTPUTS
    if rows == CONVERTING_ROWS and num_outputs <= FEW_OUTPUTS and size % (4 * BLOCK) == 0:
        return BLOCK, 4, 4
    splits = 2 if num_outputs <= FEW_OUTPUTS and size % (2 * BLOCK) == 0 else 1
    if has_few_rows and group == size and not is_large and size % (2 * BLOCK * splits) == 0:
        return 2 * BLOCK, splits, 5
    return BLOCK, splits, 5 if not is_large else 3 if has_few_rows else 4


def supports(codes: DeviceCodes) -> bool:
    """Return whether ``matmul`` supports these codes."""
    has_blocks = codes.shape[1] % BLOCK == 0 and codes.group % BLOCK == 0
    return codes.bits == 8 and has_blocks and codes.offsets is None


def is_fast(codes: DeviceCodes, x: Tensor) -> bool:
    """Return whether ``matmul`` is faster than other products, and x [T, I] has no more bits than a pair."""
    if codes.numbers.dtype != FP8:
        min_rows = 1 if codes.group == codes.shape[1] else 2
        return x.dtype != torch.float32 and min_rows <= len(x) <= MAX_INT8_PAIRS
    return x.dtype == torch.bfloat16 and len(x) <= (MAX_FP8_ROWS if codes.shape[0] <= FEW_OUTPUTS else MAX_FP8_PAIRS)


@lru_cache(maxsize=256)
def shape_for_few_rows(num_outputs: int, size: int, *, is_gated: bool) -> tuple[int, int, int]:
    """Return (inputs per block, splits, stages) of ``_few_rows_kernel``. Measured as in ``shape_of_programs``."""
    tiles, blocks, splits = -(-num_outputs // LINES), size // (2 * BLOCK), 1
    while not is_gated and tiles * splits < 4 * PROCESSORS and blocks >= 4 * splits and blocks % (2 * splits) == 0:
        splits *= 2
    return 2 * BLOCK, splits, min(3, blocks // splits)


def matmul(x: Tensor, codes: DeviceCodes, bias: Tensor | None, num_done: Tensor, *, is_gated: bool = False) -> Tensor:
    """x [T, I], codes [O, I] that ``supports`` accepts, bias [O] -> [T, O].

    num_done: [code_linear.num_tiles] int32 zeros, which are zeros again after. is_gated: return silu(first half of the
    outputs) * (second half), [T, O / 2].
    """
    num_lines, size = codes.shape
    num_rows, low_factor, num_outputs = len(x), INT8_LOW_FACTOR, num_lines // 2 if is_gated else num_lines
    if codes.numbers.dtype == FP8:
        low_factor = FP8_LOW_FACTOR if num_rows <= MAX_FP8_PAIRS else 0.0
    rows = min(max(next_power_of_2(num_rows), CONVERTING_ROWS), MAX_X_ROWS // 2 if low_factor else MAX_X_ROWS)
    converts = rows == CONVERTING_ROWS and codes.group == size and size % (2 * BLOCK) == 0
    if converts:
        block, splits, stages = shape_for_few_rows(num_outputs, size, is_gated=is_gated)
        grid = -(-num_outputs // LINES), splits, 1
    else:
        block, splits, stages = shape_of_programs(num_lines, size, codes.group, rows)
        grid = -(-num_lines // LINES), splits, -(-num_rows // rows)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    num_partials = 1 if splits == 1 else grid[0] * splits * grid[2] * LINES * rows * (2 if low_factor else 1)
    partials = torch.empty(num_partials, dtype=torch.float32, device=x.device)
    sizes = low_factor, rows, LINES, block, splits, stages, is_gated
    key = (*dtypes(x, codes.numbers, bias), codes.shape, codes.group, sizes, *alignments(x, codes.numbers))
    tensors = codes.scales, bias, partials, num_done, out
    if converts:
        weight = TensorDescriptor.from_tensor(codes.numbers, [LINES, block])
        _few_rows_kernel(grid, key, (x, weight, *tensors, num_rows, num_outputs, size, *sizes), options(4))
    else:
        numbers, x_scales = quantize_rows(x, size, codes.numbers.dtype, low_factor)
        counts = num_rows, x_scales.shape[1], num_lines
        arguments = (numbers, x_scales, codes.numbers, *tensors, *counts, size, codes.group, *sizes)
        _matmul_kernel(grid, key, arguments, options(4))
    return out
