"""Batch-invariant latent attention (arXiv 2405.04434) over pages on a GPU, in its absorbed form.

All query heads share one key per position, and the value is the first part of the key. So a key is read once, for the
scores and for the weighted sums. Rows are split as in ``kernels/triton/attention.py``, and a split is always computed
in the same way. So the result of a token has the same bits in every batch, chunk and decode step, unless ``attend``
is called with ``batch_invariant=False``.

A tile is several tokens of one row with all their heads, or one token with ``ROWS`` heads.

T tokens, R rows, H query heads, E key size, V value size, N pages of the pool, S page size, X splits of the longest
row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from aioengine.kernels.triton.attention import MASKED, merge_splits, merged, pages_of, split_start
from aioengine.kernels.triton.launcher import KernelLauncher, next_power_of_2

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.kernels.triton.attention import PagedRows, SplitPlan


class AbsorbedTile(NamedTuple):
    """Query rows of a tile, positions per block, and compile options."""

    rows: int
    block: int
    num_warps: int
    num_stages: int


NARROW = AbsorbedTile(64, 64, 8, 2)
"""For 16-bit dtypes. 64 rows are the minimum for Hopper's tensor cores. Each block of positions reads all queries, so
blocks are as large as shared memory allows.
"""
WIDE = AbsorbedTile(16, 32, 4, 1)
"""For fp32, which is multiplied without tensor cores."""


@triton.jit
def _attend_split(
    queries: tl.tensor,
    rotated: tl.tensor,
    keys: tl.tensor,
    page_ids: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    last: tl.tensor,
    scale: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the highest score, sum of weights and weighted values of each query row over positions start to stop. A
    query row attends to positions up to ``last``.
    """
    COLUMNS: tl.constexpr = queries.shape[1]
    MORE: tl.constexpr = rotated.shape[1]
    columns = tl.arange(0, COLUMNS)[None, :]
    more = VALUE_SIZE + tl.arange(0, MORE)[None, :]
    highest = tl.full((queries.shape[0],), MASKED, tl.float32)
    total = tl.zeros((queries.shape[0],), tl.float32)
    sums = tl.zeros(queries.shape, tl.float32)
    for first in tl.range(start, stop, BLOCK):
        positions = first + tl.arange(0, BLOCK)
        inside = positions < stop
        pages = tl.load(page_ids + positions // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        pointers = keys + ((pages * PAGE_SIZE + positions % PAGE_SIZE) * KEY_SIZE)[:, None]
        values = tl.load(pointers + columns, mask=inside[:, None] & (columns < VALUE_SIZE), other=0.0)
        others = tl.load(pointers + more, mask=inside[:, None] & (more < KEY_SIZE), other=0.0)
        scores = tl.dot(rotated, tl.trans(others), input_precision="ieee")
        scores = tl.dot(queries, tl.trans(values), scores, input_precision="ieee") * scale
        scores = tl.where(positions[None, :] <= last[:, None], scores, MASKED)
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = tl.fma(total, shrink, tl.sum(weights, 1))
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision="ieee")
        highest = higher
    return highest, total, sums


@triton.jit
def _load_queries(
    q: tl.tensor,
    offsets: tl.tensor,
    is_member: tl.tensor,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MORE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load the two parts of the queries at ``offsets``: the part multiplied with the values, and the rest."""
    columns = tl.arange(0, COLUMNS)[None, :]
    more = VALUE_SIZE + tl.arange(0, MORE)[None, :]
    pointers = q + offsets[:, None]
    queries = tl.load(pointers + columns, mask=is_member[:, None] & (columns < VALUE_SIZE), other=0.0)
    return queries, tl.load(pointers + more, mask=is_member[:, None] & (more < KEY_SIZE), other=0.0)


@triton.jit(do_not_specialize_on_alignment=["query_starts", "page_starts", "last_lengths", "page_ids", "tiles"])
def _attend_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    query_starts: tl.tensor,
    page_starts: tl.tensor,
    last_lengths: tl.tensor,
    page_ids: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    TOKEN_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MORE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_SPLITS: tl.constexpr,
) -> None:
    row = tl.load(tiles + 2 * tl.program_id(0))
    tile_start = tl.load(tiles + 2 * tl.program_id(0) + 1)
    first_token = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - first_token
    first_page, length = pages_of(row, page_starts, last_lengths, PAGE_SIZE)
    members = tl.arange(0, ROWS)
    token = tile_start + members // GROUP
    heads = tl.program_id(1) * GROUP + members % GROUP
    is_member = (members < ROWS // GROUP * GROUP) & (token < count) & (heads < NUM_HEADS)
    tokens = (first_token + token).to(tl.int64)
    offsets = tokens * TOKEN_STRIDE + heads * KEY_SIZE
    queries, rotated = _load_queries(q, offsets, is_member, KEY_SIZE, VALUE_SIZE, COLUMNS, MORE)
    last = length - count + tl.minimum(token, count - 1)
    stop = length - count + tl.minimum(tile_start + ROWS // GROUP, count)
    if IN_SPLITS:
        highest = tl.full((ROWS,), MASKED, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        index = tl.full((), 0, tl.int32)
        while split_start(index) < stop:
            start, end = split_start(index), tl.minimum(split_start(index + 1), stop)
            split_highest, split_total, split_sums = _attend_split(
                *(queries, rotated, keys, page_ids + first_page, start, end, last),
                *(scale, PAGE_SIZE, KEY_SIZE, VALUE_SIZE, BLOCK),
            )
            highest, total, sums = merged(highest, total, sums, split_highest, split_total, split_sums)
            index += 1
    else:
        highest, total, sums = _attend_split(
            *(queries, rotated, keys, page_ids + first_page, 0, stop, last),
            *(scale, PAGE_SIZE, KEY_SIZE, VALUE_SIZE, BLOCK),
        )
    columns = tl.arange(0, COLUMNS)[None, :]
    targets = (tokens * NUM_HEADS + heads)[:, None] * VALUE_SIZE + columns
    inside = is_member[:, None] & (columns < VALUE_SIZE)
    tl.store(out + targets, (sums / total[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["max_splits", "num_programs"],
    do_not_specialize_on_alignment=["page_starts", "last_lengths", "page_ids"],
)
def _splits_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    page_starts: tl.tensor,
    last_lengths: tl.tensor,
    page_ids: tl.tensor,
    split_sums: tl.tensor,
    split_marks: tl.tensor,
    scale: tl.tensor,
    max_splits: tl.tensor,
    num_programs: tl.tensor,
    TOKEN_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MORE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    first_page, length = pages_of(row, page_starts, last_lengths, PAGE_SIZE)
    members = tl.arange(0, ROWS)
    heads = tl.program_id(1) * GROUP + members
    is_member = (members < GROUP) & (heads < NUM_HEADS)
    offsets = row * TOKEN_STRIDE + heads * KEY_SIZE
    queries, rotated = _load_queries(q, offsets, is_member, KEY_SIZE, VALUE_SIZE, COLUMNS, MORE)
    last = tl.zeros((ROWS,), tl.int32) + (length - 1)
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = is_member[:, None] & (columns < VALUE_SIZE)
    index = tl.program_id(2)
    while split_start(index) < length:
        start, end = split_start(index), tl.minimum(split_start(index + 1), length)
        highest, total, sums = _attend_split(
            *(queries, rotated, keys, page_ids + first_page, start, end, last),
            *(scale, PAGE_SIZE, KEY_SIZE, VALUE_SIZE, BLOCK),
        )
        targets = (row * max_splits + index) * NUM_HEADS + heads
        tl.store(split_marks + 2 * targets, highest, mask=is_member)
        tl.store(split_marks + 2 * targets + 1, total, mask=is_member)
        tl.store(split_sums + targets[:, None] * VALUE_SIZE + columns, sums, mask=inside)
        index += num_programs


_attend = KernelLauncher(_attend_kernel)
_splits = KernelLauncher(_splits_kernel)


def _tile(dtype: torch.dtype) -> AbsorbedTile:
    return WIDE if dtype == torch.float32 else NARROW


def tokens_of_tile(num_heads: int, dtype: torch.dtype) -> int:
    """Return the number of tokens per tile."""
    return max(_tile(dtype).rows // num_heads, 1)


def head_tiles(num_heads: int, dtype: torch.dtype) -> int:
    """Return the number of tiles per token."""
    return -(-num_heads // _tile(dtype).rows)


def _sizes(q: Tensor, pool: tuple[Tensor, Tensor]) -> tuple[int, ...]:
    """Return the constants of both kernels, for q [T, H, E], keys [N, 1, S, E] and values [N, 1, S, V]."""
    num_heads, key_size = q.shape[1:]
    page_size, value_size = pool[1].shape[2:]
    tile = _tile(q.dtype)
    columns, more = (max(next_power_of_2(size), 16) for size in (value_size, key_size - value_size))
    group = min(num_heads, tile.rows)
    return q.stride(0), num_heads, group, page_size, key_size, value_size, columns, more, tile.rows, tile.block


def _options(dtype: torch.dtype) -> dict[str, object]:
    """Return the compile options of both kernels, which must be equal."""
    tile = _tile(dtype)
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def attend(
    q: Tensor,
    pool: tuple[Tensor, Tensor],
    rows: PagedRows,
    tiles: Tensor,
    *,
    scale: float,
    out: Tensor,
    batch_invariant: bool = True,
) -> None:
    """Attend with q [T, H, E] to keys [N, 1, S, E] and values [N, 1, S, V] (a view of the keys) into out [T, H, V].

    Args:
        tiles: [Y, 2] int32, (row, first token within the row) of each tile.
        batch_invariant: False: compute rows without splits, which is faster, but differs from ``attend_splits``.
    """
    sizes, keys = (*_sizes(q, pool), batch_invariant), pool[0]
    tensors = (q, keys, rows.query_starts, rows.page_starts, rows.last_lengths, rows.page_ids, tiles, out)
    key = (q.dtype, sizes, *(tensor.data_ptr() % 16 for tensor in (q, keys, out)))
    grid = tiles.shape[0], head_tiles(q.shape[1], q.dtype), 1
    _attend(grid, key, (*tensors, scale / math.log(2), *sizes), _options(q.dtype))


def attend_splits(
    q: Tensor, pool: tuple[Tensor, Tensor], rows: PagedRows, splits: SplitPlan, *, scale: float, out: Tensor
) -> None:
    """Compute ``attend`` with the same bits for R rows of one token, q [R, H, E] and out [R, H, V]."""
    num_rows, num_heads, _ = q.shape
    max_splits, num_programs = splits
    sizes, keys = _sizes(q, pool), pool[0]
    sums = torch.empty(num_rows, max_splits, num_heads, out.shape[2], dtype=torch.float32, device=q.device)
    stats = torch.empty(num_rows, max_splits, num_heads, 2, dtype=torch.float32, device=q.device)
    tensors = (q, keys, rows.page_starts, rows.last_lengths, rows.page_ids, sums, stats)
    key = (q.dtype, sizes, *(tensor.data_ptr() % 16 for tensor in (q, keys, sums, stats)))
    grid = num_rows, head_tiles(num_heads, q.dtype), num_programs
    numbers = scale / math.log(2), max_splits, num_programs
    _splits(grid, key, (*tensors, *numbers, *sizes), _options(q.dtype))
    merge_splits(sums, stats, rows, out, max_splits=max_splits, page_size=keys.shape[2])
