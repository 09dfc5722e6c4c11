"""LoRA for rows with different adapters: y [T, O] += B (A x), x [T, I].

The rows are in N tiles of R rows of one adapter. A row of the result depends on the other rows only through the tile
size, which is constant with ``batch_invariant``.

Kernels:

- ``_shrink_kernel`` computes A x. A program multiplies one tile by some ranks of one part of the layer, over one split
  of the inputs.
- ``_expand_kernel`` adds the splits, rounds A x to the dtype of B, multiplies it by B, and adds the result to y. A
  program computes one tile and some outputs of one part.
- ``_vector_kernel`` replaces the first one for one row: some programs multiply the layer's weight, others A.

Sums: the splits depend only on I and the tile size, and are added in a fixed order. Each sum is in fp32, from the first
to the last input.

All kernels load adapter weights while the previous kernel still runs. With few rows, the first kernel runs concurrently
with the layer's own matmul: x is complete when this matmul lets the next kernel start. The first kernel ends only after
the matmul, so the second kernel waits for both.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.adapter_types import (
    FEW_ROWS_OF_TILE,
    RANK_UNIT,
    TABLE_COLUMNS,
    UNIT,
    AdapterTiles,
    AdapterWeights,
)
from aioengine.kernels.linear import DeviceMatmul
from aioengine.kernels.row_counts import Matmul
from aioengine.kernels.triton.activation import silu_of
from aioengine.kernels.triton.dependent import start_next, start_next_and_wait, wait
from aioengine.kernels.triton.launcher import alignments, kernel, next_power_of_2, options
from aioengine.kernels.triton.skinny_linear import FEW_OUTPUTS, products, shape_of_vector_programs, vector_kernel

_UNIT = tl.constexpr(UNIT)
_RANK_UNIT = tl.constexpr(RANK_UNIT)
_COLUMNS = tl.constexpr(TABLE_COLUMNS)


MAX_AHEAD_ROWS = 64
"""Maximum rows with which the first kernel runs concurrently with the matmul. Up to this number, the kernels of
``kernels.linear`` let the next kernel start when their input is complete, or only at their end.
"""


class _Shape(NamedTuple):
    """The program sizes for one layer and tile size.

    Attributes:
        ranks, block: ranks and inputs that a program of the first kernel loads at once. split: inputs per partial sum.
        outputs: outputs per program of the second kernel. expand_ranks: ranks that it loads at once.
    """

    ranks: int
    block: int
    split: int
    outputs: int
    expand_ranks: int
    shrink_warps: int
    expand_warps: int


@lru_cache(maxsize=256)
def _shape(size: int, num_outputs: int, max_rank: int, num_rows: int, *, has_16_bits: bool) -> _Shape:
    """Return the program sizes, measured on an H200 for the layers of an 8B model. num_rows: rows per tile."""
    ranks = min(next_power_of_2(max_rank), 64)
    if not has_16_bits:
        return _Shape(min(ranks, 32), 32, 512, 64, 16, 4, 4)
    if num_rows == FEW_ROWS_OF_TILE:
        split = min(max(next_power_of_2(size) // 4, 256), 2048)
        outputs, warps = (256, 8) if num_outputs >= FEW_OUTPUTS else (128, 4)
        return _Shape(ranks, min(split, 8192 // ranks), split, outputs, 16, 4, warps)
    return _Shape(ranks, 64, 2048, 128, min(ranks, 32), 4, 8)


@triton.jit
def _entry(
    table: tl.tensor, place: tl.tensor, part: tl.tensor, slot: tl.tensor, WORDS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the address of a part's table entry, and its rank; 0 for rows of the base model."""
    entry = table + place * WORDS + part * _COLUMNS
    return entry, tl.where(slot > 0, tl.load(entry), 0) * _RANK_UNIT


@kernel(do_not_specialize=["first_part", "slot_size", "num_tiles"])
def _shrink_kernel(
    x: tl.tensor, pool: tl.tensor, table: tl.tensor, order: tl.tensor, slots: tl.tensor, partials: tl.tensor,
    first_part: tl.tensor, slot_size: tl.tensor, num_tiles: tl.tensor,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_RANKS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    MAX_RANK: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr, IS_AHEAD: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply a tile by some ranks of A of one part, over a split of the inputs.

    partials: [splits, tiles, ROWS, parts * MAX_RANK] fp32. IS_AHEAD: x is complete before the previous kernel ends.
    """
    tile, split, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    CHUNKS: tl.constexpr = (MAX_RANK + BLOCK_RANKS - 1) // BLOCK_RANKS
    part = number // CHUNKS
    ranks = number % CHUNKS * BLOCK_RANKS + tl.arange(0, BLOCK_RANKS)
    columns = split * SPLIT + tl.arange(0, BLOCK)
    slot = tl.load(slots + tile)
    place = tl.maximum(slot - 1, 0).to(tl.int64) * slot_size
    entry, num_ranks = _entry(table, place, first_part + part, slot, WORDS)
    line_pointers = pool + (place + tl.load(entry + 1)) * _UNIT + ranks[None, :] * SIZE
    is_rank = (ranks < num_ranks)[None, :]
    matrix = tl.load(line_pointers + columns[:, None], mask=is_rank & (columns < SIZE)[:, None], other=0.0)
    rows = tl.load(order + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    vectors = x + rows[:, None] * SIZE
    is_row = (rows >= 0)[:, None]
    start_next()
    if not IS_AHEAD:
        wait()
    if num_ranks > number % CHUNKS * BLOCK_RANKS:
        values = tl.load(vectors + columns[None, :], mask=is_row & (columns < SIZE)[None, :], other=0.0)
        total = tl.dot(values, matrix, input_precision="ieee")
        for start in tl.range(BLOCK, SPLIT, BLOCK):
            places = start + columns
            matrix = tl.load(line_pointers + places[:, None], mask=is_rank & (places < SIZE)[:, None], other=0.0)
            values = tl.load(vectors + places[None, :], mask=is_row & (places < SIZE)[None, :], other=0.0)
            total = tl.dot(values, matrix, total, input_precision="ieee")
        lines_out = ((split * num_tiles + tile) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None] * WIDTH
        tl.store(partials + lines_out + part * MAX_RANK + ranks[None, :], total, mask=(ranks < MAX_RANK)[None, :])
    if IS_AHEAD:
        wait()


@triton.jit
def _b_of(
    pool: tl.tensor, table: tl.tensor, place: tl.tensor, part: tl.tensor, slot: tl.tensor, outputs: tl.tensor,
    size: tl.tensor, BLOCK_RANKS: tl.constexpr, WORDS: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Return the rank and the address of B of a part, and its first columns for these outputs, [ranks, outputs]."""
    entry, num_ranks = _entry(table, place, part, slot, WORDS)
    matrix = pool + (place + tl.load(entry + 2)) * _UNIT
    ranks = tl.arange(0, BLOCK_RANKS)
    inside = (ranks < num_ranks)[:, None] & (outputs < size)[None, :]
    return num_ranks, matrix, tl.load(matrix + outputs[None, :] * num_ranks + ranks[:, None], mask=inside, other=0.0)


@triton.jit
def _product(
    partials: tl.tensor, b: tl.tuple, outputs: tl.tensor, size: tl.tensor, stride: tl.tensor,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return B (A x) [ROWS, outputs] of one part. partials: address of its first rank and the first row of the tile. b:
    see ``_b_of``.
    """
    num_ranks, matrix, first = b
    BLOCK_RANKS: tl.constexpr = first.shape[0]
    total = tl.zeros((ROWS, first.shape[1]), tl.float32)
    splits = tl.arange(0, SPLIT_BLOCK)[:, None, None]
    rows = tl.arange(0, ROWS)[None, :, None]
    for start in tl.range(0, num_ranks, BLOCK_RANKS, num_stages=1):
        ranks = start + tl.arange(0, BLOCK_RANKS)
        sums = partials + splits * stride + rows * WIDTH + ranks[None, None, :]
        inside = (splits < SPLITS) & (ranks < num_ranks)[None, None, :]
        vectors = tl.sum(tl.load(sums, mask=inside, other=0.0), 0).to(first.dtype)
        if start > 0:
            is_part = (ranks < num_ranks)[:, None] & (outputs < size)[None, :]
            first = tl.load(matrix + outputs[None, :] * num_ranks + ranks[:, None], mask=is_part, other=0.0)
        total = tl.dot(vectors, first, total, input_precision="ieee")
    return total


@kernel(do_not_specialize=["first_part", "slot_size", "num_tiles"])
def _expand_kernel(
    y: tl.tensor, out: tl.tensor, pool: tl.tensor, table: tl.tensor, order: tl.tensor, slots: tl.tensor,
    partials: tl.tensor, first_part: tl.tensor, slot_size: tl.tensor, num_tiles: tl.tensor,
    SIZE_0: tl.constexpr, SIZE_1: tl.constexpr, SIZE_2: tl.constexpr, ROWS: tl.constexpr, BLOCK_RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr, MAX_RANK: tl.constexpr,
    WIDTH: tl.constexpr, WORDS: tl.constexpr, IS_GATED: tl.constexpr,
) -> None:  # fmt: skip
    """Add B (A x) to some outputs of a tile. The outputs of a block belong to one part.

    SIZE_0, SIZE_1, SIZE_2: outputs of the parts; 0: no such part. IS_GATED: the parts are gates and ups, and the
    activated sums are stored in ``out`` instead.
    """
    block, tile = tl.program_id(0), tl.program_id(1)
    BLOCKS_0: tl.constexpr = (SIZE_0 + OUTPUTS - 1) // OUTPUTS
    BLOCKS_1: tl.constexpr = (SIZE_1 + OUTPUTS - 1) // OUTPUTS
    SIZE: tl.constexpr = SIZE_0 + SIZE_1 + SIZE_2
    is_1, is_2 = block >= BLOCKS_0, block >= BLOCKS_0 + BLOCKS_1
    part = is_1.to(tl.int32) + is_2.to(tl.int32)
    size = tl.where(is_2, SIZE_2, tl.where(is_1, SIZE_1, SIZE_0))
    first_output = tl.where(is_1, SIZE_0, 0) + tl.where(is_2, SIZE_1, 0)
    block = block - tl.where(is_1, BLOCKS_0, 0) - tl.where(is_2, BLOCKS_1, 0)
    outputs = block * OUTPUTS + tl.arange(0, OUTPUTS)
    slot = tl.load(slots + tile)
    place = tl.maximum(slot - 1, 0).to(tl.int64) * slot_size
    b = _b_of(pool, table, place, first_part + part, slot, outputs, size, BLOCK_RANKS, WORDS)
    rows = tl.load(order + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    inside = (rows >= 0) & (outputs < size)[None, :]
    values = y + rows * SIZE + first_output + outputs[None, :]
    sums = partials + tile.to(tl.int64) * (ROWS * WIDTH)
    stride = num_tiles.to(tl.int64) * (ROWS * WIDTH)
    if IS_GATED:
        up_b = _b_of(pool, table, place, first_part + 1, slot, outputs, size, BLOCK_RANKS, WORDS)
    start_next_and_wait()
    if IS_GATED:
        if slot >= 0:
            gate = tl.load(values, mask=inside, other=0.0)
            up = tl.load(values + SIZE_0, mask=inside, other=0.0)
            more = _product(sums, b, outputs, size, stride, ROWS, SPLITS, SPLIT_BLOCK, WIDTH)
            wide = (gate.to(tl.float32) + more).to(gate.dtype).to(tl.float32)
            more = _product(sums + MAX_RANK, up_b, outputs, size, stride, ROWS, SPLITS, SPLIT_BLOCK, WIDTH)
            up = (up.to(tl.float32) + more).to(gate.dtype)
            active = silu_of(wide).to(gate.dtype)
            tl.store(out + rows * SIZE_0 + outputs[None, :], active * up, mask=inside)
    elif b[0] > 0:
        before = tl.load(values, mask=inside, other=0.0)
        more = _product(sums + part * MAX_RANK, b, outputs, size, stride, ROWS, SPLITS, SPLIT_BLOCK, WIDTH)
        tl.store(values, (before.to(tl.float32) + more).to(before.dtype), mask=inside)


@kernel(do_not_specialize=["first_part", "slot_size", "num_outputs", "num_programs"])
def _vector_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, y: tl.tensor, pool: tl.tensor, table: tl.tensor,
    slots: tl.tensor, partials: tl.tensor, first_part: tl.tensor, slot_size: tl.tensor, num_outputs: tl.tensor,
    num_programs: tl.tensor, SIZE: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr, MAX_RANK: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply one row by some lines: of the layer's weight, or in the programs from ``num_programs`` on, of A."""
    number = tl.program_id(0)
    if number < num_programs:
        vector_kernel(x, weight, None, bias, y, num_outputs, SIZE, LINES, BLOCK)
    else:
        first_rank = (number - num_programs) * LINES
        part = first_rank // MAX_RANK
        ranks = first_rank % MAX_RANK + tl.arange(0, LINES)
        slot = tl.load(slots)
        place = tl.maximum(slot - 1, 0).to(tl.int64) * slot_size
        entry, num_ranks = _entry(table, place, first_part + part, slot, WORDS)
        line_pointers = pool + (place + tl.load(entry + 1)) * _UNIT + ranks[:, None] * SIZE
        result = products(line_pointers, ranks[:, None] < num_ranks, x, SIZE, BLOCK)
        tl.store(partials + part * MAX_RANK + ranks, result, mask=ranks < num_ranks)


def add(matmul: Matmul, x: Tensor, weights: AdapterWeights, tiles: AdapterTiles, *, is_gated: bool) -> Tensor:
    """Return ``matmul(x)`` plus the adapter outputs: x [T, I], contiguous -> [T, O].

    With ``is_gated``, return silu(gate) * up of the two parts: [T, O / 2].
    """
    num_tiles, num_rows = tiles.order.shape
    shape = _shape(weights.size, max(weights.sizes), weights.max_rank, num_rows, has_16_bits=x.dtype != torch.float32)
    sizes = (*weights.sizes, 0, 0)[:3]
    width, unit_words = len(weights.sizes) * weights.max_rank, UNIT * x.dtype.itemsize // 4
    ranks = weights.max_rank, width, unit_words
    memory, numbers = (weights.pool, weights.table), (weights.first_part, weights.pool.shape[1] // UNIT)
    common = weights.pool.dtype, weights.size, sizes, weights.max_rank, num_rows, *alignments(tiles.order, tiles.slots)
    of_vector = matmul if x.shape[0] == 1 and isinstance(matmul, DeviceMatmul) else None
    num_splits = -(-weights.size // shape.split) if of_vector is None else 1
    # Partial sums A x. They are allocated before y: the matmul may still use freed memory.
    partials = weights.pool.new_empty((num_splits, num_tiles, num_rows, width), dtype=torch.float32)
    if of_vector is not None:
        weight, bias = of_vector.weight, of_vector.bias
        num_outputs, size = weight.shape
        y = x.new_empty((1, num_outputs))
        lines, block, num_warps = shape_of_vector_programs(num_outputs, size)
        num_programs = -(-num_outputs // lines)
        tensors = x, weight, bias, y, *memory, tiles.slots, partials
        sizes_of_vector = num_outputs, num_programs, size, lines, block, weights.max_rank, unit_words
        arguments = (*tensors, *numbers, *sizes_of_vector)
        key = common, weight.shape, bias is None, *alignments(x, weight)
        _vector_kernel((num_programs + width // lines, 1, 1), key, arguments, options(num_warps))
    else:
        y = matmul(x)
        is_ahead = x.shape[0] <= MAX_AHEAD_ROWS
        programs = shape.ranks, shape.block, shape.split
        tensors = x, *memory, tiles.order, tiles.slots, partials
        arguments = (*tensors, *numbers, num_tiles, weights.size, num_rows, *programs, *ranks, is_ahead)
        num_chunks = len(weights.sizes) * -(-weights.max_rank // shape.ranks)
        key = common, x.data_ptr() % 16, is_ahead
        _shrink_kernel((num_tiles, num_splits, num_chunks), key, arguments, options(shape.shrink_warps))
    out = y.new_empty((y.shape[0], sizes[0])) if is_gated else y
    tensors = y, out, *memory, tiles.order, tiles.slots, partials
    programs = shape.expand_ranks, shape.outputs, num_splits, next_power_of_2(num_splits)
    arguments = (*tensors, *numbers, num_tiles, *sizes, num_rows, *programs, *ranks, is_gated)
    num_blocks = sum(-(-size // shape.outputs) for size in (sizes[:1] if is_gated else sizes))
    key = common, num_splits, y.data_ptr() % 16, is_gated
    _expand_kernel((num_blocks, num_tiles, 1), key, arguments, options(shape.expand_warps))
    return out
