"""``kernels.adapter_linear`` on a GPU, in two kernels: x [T, I] -> A x in partial sums -> y [T, O] += B (A x).

The inputs are split among programs, and how depends on I and the rows of a tile alone; the second kernel adds the
partial sums up, always in the same order. Both load what they read of the adapters while the kernel before is still at
work, and then wait for x or y. T rows in N tiles of R rows, K partial sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aioengine.kernels.adapter_slots import FEW_ROWS_OF_TILE, RANKS, TABLE_COLUMNS, UNIT
from aioengine.kernels.triton.launcher import Launcher, has_dependent_launch, next_power_of_2, options

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.kernels.adapter_slots import AdapterWeights, Tiles
    from aioengine.kernels.linear import Matmul

_UNIT = tl.constexpr(UNIT)
_RANKS = tl.constexpr(RANKS)
_COLUMNS = tl.constexpr(TABLE_COLUMNS)


class _Shape(NamedTuple):
    """Of the programs for one layer and tiles of some rows: ranks and inputs that a program of the first kernel loads
    at a time, the inputs of a partial sum, the outputs of a program of the second kernel, and warps of both.
    """

    ranks: int
    block: int
    split: int
    outputs: int
    shrink_warps: int
    expand_warps: int


def _shape(size: int, max_rank: int, num_rows: int, dtype: torch.dtype) -> _Shape:
    ranks = min(next_power_of_2(max_rank), 64)
    if dtype == torch.float32:
        return _Shape(min(ranks, 32), 32, 512, 64, 4, 4)
    if num_rows == FEW_ROWS_OF_TILE:
        split = 512 if size >= 2048 else 256
        return _Shape(ranks, min(split, 8192 // ranks), split, 128, 4, 4)
    return _Shape(ranks, 64, 2048, 128, 4, 8)


@triton.jit
def _entry(
    table: tl.tensor, place: tl.tensor, part: tl.tensor, slot: tl.tensor, WORDS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The address of a part's entry, and its rank; 0 for rows of the base model."""
    entry = table + place * WORDS + part * _COLUMNS
    return entry, tl.where(slot > 0, tl.load(entry), 0) * _RANKS


@triton.jit(do_not_specialize=["first_part", "slot_size", "num_tiles"])
def _shrink_kernel(
    x: tl.tensor,
    pool: tl.tensor,
    table: tl.tensor,
    order: tl.tensor,
    slots: tl.tensor,
    partials: tl.tensor,
    first_part: tl.tensor,
    slot_size: tl.tensor,
    num_tiles: tl.tensor,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    tile, split, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    CHUNKS: tl.constexpr = (MAX_RANK + BLOCK_RANKS - 1) // BLOCK_RANKS
    part = number // CHUNKS
    ranks = number % CHUNKS * BLOCK_RANKS + tl.arange(0, BLOCK_RANKS)
    columns = split * SPLIT + tl.arange(0, BLOCK)
    slot = tl.load(slots + tile)
    place = tl.maximum(slot - 1, 0).to(tl.int64) * slot_size
    entry, num_ranks = _entry(table, place, first_part + part, slot, WORDS)
    lines = pool + (place + tl.load(entry + 1)) * _UNIT + ranks[None, :] * SIZE
    is_rank = (ranks < num_ranks)[None, :]
    matrix = tl.load(lines + columns[:, None], mask=is_rank & (columns < SIZE)[:, None], other=0.0)
    rows = tl.load(order + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    vectors = x + rows[:, None] * SIZE
    is_row = (rows >= 0)[:, None]
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if num_ranks > number % CHUNKS * BLOCK_RANKS:
        values = tl.load(vectors + columns[None, :], mask=is_row & (columns < SIZE)[None, :], other=0.0)
        total = tl.dot(values, matrix, input_precision="ieee")
        for start in tl.range(BLOCK, SPLIT, BLOCK):
            places = start + columns
            matrix = tl.load(lines + places[:, None], mask=is_rank & (places < SIZE)[:, None], other=0.0)
            values = tl.load(vectors + places[None, :], mask=is_row & (places < SIZE)[None, :], other=0.0)
            total = tl.dot(values, matrix, total, input_precision="ieee")
        lines_out = ((split * num_tiles + tile) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None] * WIDTH
        tl.store(partials + lines_out + part * MAX_RANK + ranks[None, :], total, mask=(ranks < MAX_RANK)[None, :])


@triton.jit
def _first_lines(
    pool: tl.tensor, place: tl.tensor, entry: tl.tensor, num_ranks: tl.tensor, outputs: tl.tensor, size: tl.tensor,
    BLOCK_RANKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Where B of a part begins, and its first columns for these outputs, [BLOCK_RANKS, outputs]."""
    matrix = pool + (place + tl.load(entry + 2)) * _UNIT
    ranks = tl.arange(0, BLOCK_RANKS)
    inside = (ranks < num_ranks)[:, None] & (outputs < size)[None, :]
    return matrix, tl.load(matrix + outputs[None, :] * num_ranks + ranks[:, None], mask=inside, other=0.0)


@triton.jit
def _product(
    partials: tl.tensor, matrix: tl.tensor, first: tl.tensor, num_ranks: tl.tensor, outputs: tl.tensor,
    size: tl.tensor, stride: tl.tensor, ROWS: tl.constexpr, BLOCK_RANKS: tl.constexpr, OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """B (A x) [ROWS, OUTPUTS] of one part; ``partials``: of its first rank and the tile's first row."""
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    splits = tl.arange(0, SPLIT_BLOCK)[:, None, None]
    rows = tl.arange(0, ROWS)[None, :, None]
    for start in tl.range(0, num_ranks, BLOCK_RANKS):
        ranks = start + tl.arange(0, BLOCK_RANKS)
        sums = partials + splits * stride + rows * WIDTH + ranks[None, None, :]
        inside = (splits < SPLITS) & (ranks < num_ranks)[None, None, :]
        vectors = tl.sum(tl.load(sums, mask=inside, other=0.0), 0).to(first.dtype)
        if start > 0:
            is_part = (ranks < num_ranks)[:, None] & (outputs < size)[None, :]
            first = tl.load(matrix + outputs[None, :] * num_ranks + ranks[:, None], mask=is_part, other=0.0)
        total = tl.dot(vectors, first, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["first_part", "slot_size", "num_tiles"])
def _expand_kernel(
    y: tl.tensor, out: tl.tensor, pool: tl.tensor, table: tl.tensor, order: tl.tensor, slots: tl.tensor,
    partials: tl.tensor, first_part: tl.tensor, slot_size: tl.tensor, num_tiles: tl.tensor,
    SIZE_0: tl.constexpr, SIZE_1: tl.constexpr, SIZE_2: tl.constexpr, ROWS: tl.constexpr, BLOCK_RANKS: tl.constexpr,
    OUTPUTS: tl.constexpr, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr, MAX_RANK: tl.constexpr,
    WIDTH: tl.constexpr, WORDS: tl.constexpr, IS_GATED: tl.constexpr, DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
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
    entry, num_ranks = _entry(table, place, first_part + part, slot, WORDS)
    matrix, first = _first_lines(pool, place, entry, num_ranks, outputs, size, BLOCK_RANKS)
    rows = tl.load(order + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    inside = (rows >= 0) & (outputs < size)[None, :]
    values = y + rows * SIZE + first_output + outputs[None, :]
    sums = partials + tile.to(tl.int64) * (ROWS * WIDTH)
    stride = num_tiles.to(tl.int64) * (ROWS * WIDTH)
    if IS_GATED:
        up_entry, num_up_ranks = _entry(table, place, first_part + 1, slot, WORDS)
        up_matrix, up_first = _first_lines(pool, place, up_entry, num_up_ranks, outputs, size, BLOCK_RANKS)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if IS_GATED:
        if slot >= 0:
            gate = tl.load(values, mask=inside, other=0.0)
            up = tl.load(values + SIZE_0, mask=inside, other=0.0)
            more = _product(
                sums, matrix, first, num_ranks, outputs, size, stride,
                ROWS, BLOCK_RANKS, OUTPUTS, SPLITS, SPLIT_BLOCK, WIDTH,
            )  # fmt: skip
            wide = (gate.to(tl.float32) + more).to(gate.dtype).to(tl.float32)
            more = _product(
                sums + MAX_RANK, up_matrix, up_first, num_up_ranks, outputs, size, stride,
                ROWS, BLOCK_RANKS, OUTPUTS, SPLITS, SPLIT_BLOCK, WIDTH,
            )  # fmt: skip
            up = (up.to(tl.float32) + more).to(gate.dtype)
            active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
            tl.store(out + rows * SIZE_0 + outputs[None, :], active * up, mask=inside)
    elif num_ranks > 0:
        before = tl.load(values, mask=inside, other=0.0)
        more = _product(
            sums + part * MAX_RANK, matrix, first, num_ranks, outputs, size, stride,
            ROWS, BLOCK_RANKS, OUTPUTS, SPLITS, SPLIT_BLOCK, WIDTH,
        )  # fmt: skip
        tl.store(values, (before.to(tl.float32) + more).to(before.dtype), mask=inside)


_shrink = Launcher(_shrink_kernel)
_expand = Launcher(_expand_kernel)


def add(matmul: Matmul, x: Tensor, weights: AdapterWeights, tiles: Tiles, *, is_gated: bool) -> Tensor:
    """As ``kernels.adapter_linear.add``: x [T, I] -> [T, O], or [T, O / 2] with ``is_gated``."""
    num_tiles, num_rows = tiles.order.shape
    shape = _shape(weights.size, weights.max_rank, num_rows, x.dtype)
    num_parts, num_splits = len(weights.sizes), -(-weights.size // shape.split)
    width = num_parts * weights.max_rank
    partials = torch.empty(num_splits, num_tiles, num_rows, width, dtype=torch.float32, device=x.device)
    y = matmul(x)
    words = UNIT * x.dtype.itemsize // 4
    sizes = (*weights.sizes, 0, 0)[:3]
    is_dependent = has_dependent_launch()
    common = (tiles.order, tiles.slots, partials, weights.first_part, weights.pool.shape[1] // UNIT, num_tiles)
    out = y if not is_gated else torch.empty(y.shape[0], weights.sizes[0], dtype=y.dtype, device=y.device)
    alignments = x.data_ptr() % 16, y.data_ptr() % 16, tiles.order.data_ptr() % 16, tiles.slots.data_ptr() % 16
    key = x.dtype, weights.size, sizes, num_rows, weights.max_rank, alignments, is_gated
    num_chunks = -(-weights.max_rank // shape.ranks)
    _shrink(
        (num_tiles, num_splits, num_parts * num_chunks),
        key,
        (
            *(x, weights.pool, weights.table, *common, weights.size, num_rows, shape.ranks, shape.block, shape.split),
            *(weights.max_rank, width, words, is_dependent),
        ),
        options(shape.shrink_warps),
    )
    num_blocks = sum(-(-size // shape.outputs) for size in (sizes[:1] if is_gated else sizes))
    _expand(
        (num_blocks, num_tiles, 1),
        key,
        (
            *(y, out, weights.pool, weights.table, *common, *sizes, num_rows, shape.ranks, shape.outputs),
            *(num_splits, next_power_of_2(num_splits), weights.max_rank, width, words, is_gated, is_dependent),
        ),
        options(shape.expand_warps),
    )
    return out
