"""Matmul with a weight of 4 or 8 bits per number (``DeviceCodes``) on a GPU: x [T, I], bias [O] -> [T, O].

For few rows, the time is limited by reading the weight, as in ``skinny_linear``. Numbers are converted in registers to
operands of tensor cores (``device_codes``). For many rows it is faster to ``dequantize`` the weight first. One row has
further kernels (``code_vector``), and 8-bit weights too (``byte_linear``).

Programs: each computes some outputs of some rows, over one split of the inputs. The one that finishes a tile last adds
its splits.

Sums: in fp32, from the first to the last input of a split, then split after split. The number of splits depends on T,
so the bits do too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from aioengine.kernels.codes import FP8, PIECES, piece_of
from aioengine.kernels.triton import code_vector, skinny_linear
from aioengine.kernels.triton.dependent import start_next_and_wait, wait_and_start_next
from aioengine.kernels.triton.device_codes import DeviceCodes, joined, narrowed, scaled, weights_of
from aioengine.kernels.triton.launcher import PROCESSORS, alignments, dtypes, kernel, next_power_of_2, options
from aioengine.kernels.triton.skinny_linear import MANY_OUTPUTS, MIN_ROWS, with_other_splits

MAX_CODE_ROWS = 256
"""With more rows, it is faster to dequantize the weight first; see ``max_rows``."""
SMALL_ROWS = 64
"""Up to this number of rows, programs are smaller."""
MIN_OUTPUTS = 64
"""Minimum outputs of a program."""
MANY_INPUTS = 8192
"""With more inputs and few rows, they are split more often."""
PIECE = tl.constexpr(PIECES[0])
"""Columns of the pieces of 4-bit codes that ``matmul`` supports."""
DEQUANTIZED_LINES = 32
"""Lines of a program that dequantizes 4-bit codes."""


class CodePrograms(NamedTuple):
    """Outputs, inputs per block, splits of the inputs, stages, warps, and rows of a program."""

    outputs: int
    block: int
    splits: int
    stages: int
    warps: int
    rows: int


class CodeTile(NamedTuple):
    """Outputs and rows of a program, and its warps.

    The inputs are split while there are fewer than ``programs`` programs, into parts of at least ``inputs``.
    """

    outputs: int
    rows: int
    warps: int
    programs: int
    inputs: int


LARGE_TILE = CodeTile(128, 256, 8, 120, 2048)
"""For many rows."""
TILES = {
    "few": {64: CodeTile(64, 64, 4, 240, 512), 256: CodeTile(64, 128, 4, 132, 2048), 512: LARGE_TILE},
    "many": {64: CodeTile(128, 64, 4, 132, 2048), 128: CodeTile(64, 128, 4, 132, 2048), 512: LARGE_TILE},
}
"""Few or ``MANY_OUTPUTS`` of 4-bit codes -> maximum rows -> tile."""


@kernel(do_not_specialize=["num_rows"])
def _matmul_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, offsets: tl.tensor, zeros: tl.tensor, table: tl.tensor,
    bias: tl.tensor, partials: tl.tensor, num_done: tl.tensor, out: tl.tensor, num_rows: tl.tensor,
    num_outputs: tl.tensor,
    SIZE: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply some rows by some lines, over a split of the inputs. 4-bit codes are multiplied piece by piece.

    8-bit numbers are multiplied before they are scaled, if possible: the sum of all inputs is scaled if an output has
    one scale, or the sum of a block if all of its inputs have the same scale.
    """
    split, first_row = tl.program_id(1), tl.program_id(2) * ROWS
    first = split * (SIZE // SPLITS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    rows = first_row + tl.arange(0, ROWS)[None, :]
    tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    clamped = tl.minimum(outputs, num_outputs - 1)
    codes = scales, offsets, zeros, table, num_outputs
    PER_ITEM: tl.constexpr = 1 if BITS == 8 else 4
    PART: tl.constexpr = PIECE // 4
    line_pointers = weight + clamped.to(tl.int64) * (SIZE // PER_ITEM)
    is_row = rows < num_rows
    wait_and_start_next()
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in tl.range(first, first + SIZE // SPLITS, BLOCK, num_stages=STAGES):
        if BITS == 8:
            columns = start + tl.arange(0, BLOCK)
            group = clamped + start // GROUP * num_outputs
            numbers = tl.load(line_pointers + columns[None, :])
            vectors = tl.load(x + rows * SIZE + columns[:, None], mask=is_row, other=0.0)
            if GROUP == SIZE and offsets is None:
                total = tl.dot(narrowed(numbers, vectors), vectors, total)
            elif GROUP % BLOCK == 0 and offsets is None:
                total += tl.dot(narrowed(numbers, vectors), vectors) * tl.load(scales + group)
            else:
                groups = group + tl.arange(0, (BLOCK + GROUP - 1) // GROUP)[None, :] * num_outputs
                numbers = scaled(numbers.to(tl.float32), scales, offsets, None, groups, None, -1)
                total = tl.dot(numbers.to(vectors.dtype), vectors, total)
        else:
            for piece in tl.static_range(BLOCK // PIECE):
                place = start + piece * PIECE
                words = tl.load(line_pointers + place // 4 + tl.arange(0, PART)[None, :])
                vectors = tl.load(x + rows * SIZE + place + tl.arange(0, PIECE)[:, None], mask=is_row, other=0.0)
                weights = joined(weights_of(words, codes, clamped, place, GROUP, ZERO, vectors.dtype))
                total = tl.dot(weights, vectors, total)
    total, all_done = with_other_splits(total, partials, num_done, tile, split, SPLITS)
    if all_done:
        if BITS == 8 and GROUP == SIZE and offsets is None:
            total *= tl.load(scales + clamped)
        if bias is not None:
            total += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)
        inside = is_row & (outputs < num_outputs)
        tl.store(out + rows * num_outputs + outputs, total.to(out.dtype.element_ty), mask=inside)


def supports_vector(codes: DeviceCodes) -> bool:
    """Return whether ``vector_matmul`` supports codes that ``supports`` accepts, with inputs in bf16."""
    if codes.bits == 4:
        return codes.table is None and code_vector.supports(codes.shape[0], codes.group)
    return codes.numbers.dtype == FP8 and len(codes.scales) == 1


def vector_matmul(x: Tensor, codes: DeviceCodes, bias: Tensor | None, *, is_gated: bool = False) -> Tensor:
    """x [1, I] bf16, codes [O, I], bias [O] -> [1, O].

    is_gated: return silu(first half of the outputs) * (second half), [1, O / 2]. 8-bit codes must have no bias then.
    """
    if codes.bits == 4:
        tensors = codes.scales, codes.offsets, codes.zeros, bias
        return code_vector.matmul(x, codes.numbers, tensors, codes.group, codes.zero, is_gated=is_gated)
    if is_gated:
        return skinny_linear.gated_vector_matmul(x, codes.numbers, codes.scales)
    return skinny_linear.vector_matmul(x, codes.numbers, bias, codes.scales)


def supports(size: int, group: int, bits: int) -> bool:
    """Return whether ``matmul`` supports weights with these inputs, inputs per scale, and bits."""
    min_group = 16 if bits == 8 else PIECES[0] // 4
    return size % PIECES[0] == 0 and (group % PIECES[0] == 0 or (group >= min_group and PIECES[0] % group == 0))


def max_rows(codes: DeviceCodes) -> int:
    """Return the maximum number of rows with which ``matmul`` is faster than dequantizing the weight first."""
    return 2 * MAX_CODE_ROWS if codes.bits == 4 and codes.table is None and codes.offsets is None else MAX_CODE_ROWS


@lru_cache(maxsize=1024)
def shape_of_programs(num_outputs: int, size: int, group: int, bits: int, num_rows: int) -> CodePrograms:
    """Return the programs, as measured on an H200 for the layers of an 8B model."""
    is_large = num_outputs >= MANY_OUTPUTS
    if bits == 8:
        tile = CodeTile(64, SMALL_ROWS, 4, 2 * PROCESSORS, size // 4)
        if num_rows > SMALL_ROWS:
            tile = CodeTile(128, SMALL_ROWS, 8, PROCESSORS, size // 4)
    else:
        tile = next(tile for limit, tile in TILES["many" if is_large else "few"].items() if num_rows <= limit)
        if size > MANY_INPUTS and num_rows <= SMALL_ROWS // 2 and not is_large:
            tile = tile._replace(programs=2 * tile.programs)
    rows = min(max(next_power_of_2(num_rows), MIN_ROWS), tile.rows)
    tiles, splits = -(-num_outputs // tile.outputs) * -(-num_rows // rows), 1
    while tiles * splits < tile.programs and size >= 2 * splits * tile.inputs and size % (2 * splits * PIECES[0]) == 0:
        splits *= 2
    is_crowded = tiles * splits > 2 * PROCESSORS  # with 3 stages, a processor has three programs at once
    if bits == 8:
        has_long_blocks, stages = num_rows == 1 and group % (2 * PIECES[0]) == 0, 4 if splits == 1 else 3
    else:
        has_long_blocks = rows in (8, 32) if is_large else rows == 32 and splits == 4 and is_crowded
        is_large_tile = rows > SMALL_ROWS or (rows == SMALL_ROWS and not is_large and is_crowded)
        stages = 3 if has_long_blocks or is_large_tile else 4
    block = 2 * PIECES[0] if has_long_blocks and size % (2 * splits * PIECES[0]) == 0 else PIECES[0]
    return CodePrograms(tile.outputs, block, splits, stages, tile.warps, rows)


def num_tiles(num_outputs: int) -> int:
    """Return the maximum number of output tiles. Each needs a counter."""
    return -(-num_outputs // MIN_OUTPUTS) * -(-MAX_CODE_ROWS // SMALL_ROWS)


def matmul(x: Tensor, codes: DeviceCodes, bias: Tensor | None, num_done: Tensor) -> Tensor:
    """x [T, I], codes [O, I], bias [O] -> [T, O]. num_done: [num_tiles] int32 zeros, which are zeros again after."""
    num_outputs, size = codes.shape
    num_rows = x.shape[0]
    programs = shape_of_programs(num_outputs, size, codes.group, codes.bits, num_rows)
    outputs, block, splits, stages, num_warps, rows = programs
    grid = -(-num_outputs // outputs), splits, -(-num_rows // rows)
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    num_partials = 1 if splits == 1 else grid[0] * splits * grid[2] * outputs * rows
    partials = torch.empty(num_partials, dtype=torch.float32, device=x.device)
    sizes = size, codes.group, codes.bits, codes.zero, rows, outputs, block, splits, stages
    tensors = codes.numbers, codes.scales, codes.offsets, codes.zeros, codes.table, bias
    arguments = (x, *tensors, partials, num_done, out, num_rows, num_outputs, *sizes)
    key = (*dtypes(x, *tensors), num_outputs, sizes, num_warps, *alignments(x, codes.numbers))
    _matmul_kernel(grid, key, arguments, options(num_warps))
    return out


@kernel()
def _dequantize_kernel(
    weight: tl.tensor, scales: tl.tensor, offsets: tl.tensor, out: tl.tensor, num_outputs: tl.tensor,
    SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Dequantize 8-bit numbers."""
    start_next_and_wait()
    output = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    values = tl.load(weight + output * SIZE + columns, mask=inside).to(tl.float32)
    values = scaled(values, scales, offsets, None, output + columns // GROUP * num_outputs, inside, -1)
    tl.store(out + output * SIZE + columns, values.to(out.dtype.element_ty), mask=inside)


@kernel()
def _dequantize_words_kernel(
    weight: tl.tensor, scales: tl.tensor, offsets: tl.tensor, zeros: tl.tensor, table: tl.tensor, out: tl.tensor,
    num_outputs: tl.tensor,
    SIZE: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, WIDTH: tl.constexpr, LINES: tl.constexpr,
) -> None:  # fmt: skip
    """Dequantize a piece of 4-bit codes, which has WIDTH words, of some lines."""
    start_next_and_wait()
    lines = tl.program_id(1) * LINES + tl.arange(0, LINES)[:, None]
    lines = tl.minimum(lines, num_outputs - 1)  # beyond the end, repeat the last one
    places = lines.to(tl.int64) * (SIZE // 4) + tl.program_id(0) * WIDTH
    words = tl.load(weight + places + tl.arange(0, WIDTH)[None, :])
    start = tl.program_id(0) * (4 * WIDTH)
    codes = scales, offsets, zeros, table, num_outputs
    parts = weights_of(words, codes, lines, start, GROUP, ZERO, out.dtype.element_ty)
    for index in tl.static_range(4):
        tl.store(out + places * 4 + (tl.arange(0, WIDTH) + index * WIDTH)[None, :], parts[index])


def dequantize(codes: DeviceCodes, dtype: torch.dtype) -> Tensor:
    """Return the weight [O, I], with its columns in the order of the codes."""
    num_outputs, size = codes.shape
    out = torch.empty((num_outputs, size), dtype=dtype, device=codes.numbers.device)
    tensors = codes.numbers, codes.scales, codes.offsets, codes.zeros, codes.table
    key = (dtype, *dtypes(*tensors), codes.shape, codes.group, codes.zero, *alignments(codes.numbers))
    if codes.bits == 8:
        arguments = (*tensors[:3], out, num_outputs, size, codes.group, 1024)
        _dequantize_kernel((num_outputs, -(-size // 1024), 1), key, arguments, options(4))
    else:
        piece = piece_of(size)
        arguments = (*tensors, out, num_outputs, size, codes.group, codes.zero, piece // 4, DEQUANTIZED_LINES)
        _dequantize_words_kernel((size // piece, -(-num_outputs // DEQUANTIZED_LINES), 1), key, arguments, options(4))
    return out
