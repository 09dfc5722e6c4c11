"""Batch-invariant attention over pages on a GPU: the result of a row does not depend on other rows.

The positions of a row are divided into splits, and the splits of a token are merged in order. Splits start at the same
positions in all rows: every 256 positions up to position 8192. After that, each doubling of the positions has 16
splits, so that long rows do not have too many. A split is always computed by a tile of ``ROWS`` query rows in blocks of
``BLOCK`` positions, in decode steps and in prefill chunks. So neither the batch nor chunks, prefix hits or preemption
change a bit of the result.

With a window, splits and blocks that no token of a tile sees are skipped. This does not change a bit either, because
the weights of positions before the window become exactly zero at the first visible position.

A tile is several tokens of one row with all query heads of one kv head. ``attend`` computes the splits of a tile one
after the other. ``attend_splits`` is for few rows of one token; it computes their splits in parallel.

The kernels also compute latent attention (arXiv 2405.04434) in its absorbed form: all query heads share one key per
position, and the value is the first part of the key. So a key is read once, for the scores and for the weighted sums.
A tile then has all heads of several tokens, or a part of the heads of one token.

T tokens, R rows, H query heads, K kv heads, E key size, V value size (E without latent attention), N pages of the pool,
S page size, X splits of the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from aioengine.kernels.triton.launcher import KernelLauncher, alignments, next_power_of_2
from aioengine.kernels.triton.scores import (
    MASKED,
    NO_RULES,
    capped,
    merged,
    nothing_attended,
    softmax_step,
    store_split,
    with_sinks,
)

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.kernels.triton.scores import ScoreRules

    Pool = tuple[Tensor, Tensor]

SPLIT = tl.constexpr(256)
"""Positions per split at the start of a row. Splits are multiples of ``BLOCK``."""
EVEN_SPLITS = tl.constexpr(32)
"""Number of splits of this size. After that, each doubling of the positions has half as many splits."""
ROWS = 64
"""Query rows of a tile, unless one token has more. 64 is the minimum for Hopper's tensor cores."""
BLOCK = 64


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The tokens and pages of R rows; all int32.

    Attributes:
        query_starts: [R + 1] start of each row among the T tokens.
        page_starts: [R + 1] start of each row in ``page_ids``.
        last_lengths: [R] number of positions on the last page.
        page_ids: the concatenated page tables.
    """

    query_starts: Tensor
    page_starts: Tensor
    last_lengths: Tensor
    page_ids: Tensor


def num_splits(length: int) -> int:
    """Return the number of splits of a row of ``length`` positions."""
    half, even = EVEN_SPLITS.value // 2, EVEN_SPLITS.value * SPLIT.value
    doublings = max((length - 1) // even, 0).bit_length()  # of ``even`` until it covers the row
    if not doublings:
        return -(-length // SPLIT.value)
    before = even << (doublings - 1)
    return half * (doublings + 1) + -(-(length - before) // (before // half))


@triton.jit
def split_start(index: tl.tensor) -> tl.tensor:
    """Return the first position of a split."""
    HALF: tl.constexpr = EVEN_SPLITS // 2
    doublings = tl.maximum(index // HALF - 1, 0)
    return (index - doublings * HALF) * SPLIT << doublings


@triton.jit
def first_split(first_seen: tl.tensor) -> tl.tensor:
    """Return the split that contains position ``first_seen``."""
    index = tl.full((), 0, tl.int32)
    while split_start(index + 1) <= first_seen:
        index += 1
    return index


@triton.jit
def pages_of(
    row: tl.tensor, page_starts: tl.tensor, last_lengths: tl.tensor, PAGE_SIZE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the index of a row's first page, and its number of positions."""
    first_page = tl.load(page_starts + row)
    return first_page, (tl.load(page_starts + row + 1) - first_page - 1) * PAGE_SIZE + tl.load(last_lengths + row)


@triton.jit
def load_part(pointers: tl.tensor, is_there: tl.tensor, SIZE: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """Load [X, COLUMNS] from pointers [X, 1] to rows of SIZE elements; padded with 0."""
    columns = tl.arange(0, COLUMNS)[None, :]
    return tl.load(pointers + columns, mask=is_there[:, None] & (columns < SIZE), other=0.0)


@triton.jit
def _attend_split(
    queries: tl.tensor,
    rotated: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    page_ids: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    last: tl.tensor,
    first_seen: tl.tensor,
    scale: tl.tensor,
    PAGE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    MORE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the highest score, sum of weights and weighted values of each query row over positions start to stop. A
    query row attends to positions up to ``last``. first_seen: the first position that any query row attends to.
    """
    columns = tl.arange(0, queries.shape[1])[None, :]
    highest, total, sums = nothing_attended(queries.shape[0], queries.shape[1])
    if WINDOW:
        start += tl.maximum(first_seen - start, 0) // BLOCK * BLOCK
    for first in tl.range(start, stop, BLOCK):
        positions = first + tl.arange(0, BLOCK)
        inside = positions < stop
        if WINDOW:
            inside = inside & (positions >= first_seen)
        pages = tl.load(page_ids + positions // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        sources = (pages * PAGE_STRIDE + positions % PAGE_SIZE * KEY_SIZE)[:, None]
        there = inside[:, None] & (columns < VALUE_SIZE)
        part = tl.load(keys + (sources + columns), mask=there, other=0.0)
        if MORE:
            others = load_part(keys + (sources + VALUE_SIZE), inside, KEY_SIZE - VALUE_SIZE, MORE)
            scores = tl.dot(rotated, tl.trans(others), input_precision="ieee")
            scores = tl.dot(queries, tl.trans(part), scores, input_precision="ieee") * scale
        else:
            scores = tl.dot(queries, tl.trans(part), input_precision="ieee") * scale
        if CAP > 0.0:
            scores = capped(scores, CAP)
        is_seen = positions[None, :] <= last[:, None]
        if WINDOW:
            is_seen = is_seen & (positions[None, :] > last[:, None] - WINDOW)
        weights, shrink, highest, total = softmax_step(tl.where(is_seen, scores, MASKED), highest, total)
        if not MORE:
            part = tl.load(values + (sources + columns), mask=there, other=0.0)
        sums = tl.dot(weights.to(part.dtype), part, sums * shrink[:, None], input_precision="ieee")
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
    """Load the first ``VALUE_SIZE`` elements of the queries at ``offsets``, and the rest if there is one."""
    pointers = q + offsets[:, None]
    queries = load_part(pointers, is_member, VALUE_SIZE, COLUMNS)
    rotated = load_part(pointers + VALUE_SIZE, is_member, KEY_SIZE - VALUE_SIZE, MORE) if MORE else queries
    return queries, rotated


@triton.jit
def tokens_of(
    tiles: tl.tensor,
    index: tl.tensor,
    query_starts: tl.tensor,
    page_starts: tl.tensor,
    last_lengths: tl.tensor,
    PAGE_SIZE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the start of a tile in its row; the first token, number of tokens, first page and length of the row."""
    row = tl.load(tiles + 2 * index)
    tile_start = tl.load(tiles + 2 * index + 1)
    first_token = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - first_token
    first_page, length = pages_of(row, page_starts, last_lengths, PAGE_SIZE)
    return tile_start, first_token, count, first_page, length


@triton.jit(do_not_specialize_on_alignment=["query_starts", "page_starts", "last_lengths", "page_ids", "tiles"])
def _attend_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    query_starts: tl.tensor,
    page_starts: tl.tensor,
    last_lengths: tl.tensor,
    page_ids: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    sinks: tl.tensor,
    scale: tl.tensor,
    TOKEN_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TILE_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MORE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    IN_SPLITS: tl.constexpr,
) -> None:
    tile_start, first_token, count, first_page, length = tokens_of(
        tiles, tl.program_id(0), query_starts, page_starts, last_lengths, PAGE_SIZE
    )
    members = tl.arange(0, ROWS)
    token = tile_start + members // GROUP
    heads = tl.program_id(1) * GROUP + members % GROUP
    is_member = (members < ROWS // GROUP * GROUP) & (token < count)
    if NUM_HEADS % GROUP:
        is_member = is_member & (heads < NUM_HEADS)
    tokens = (first_token + token).to(tl.int64)
    offsets = tokens * TOKEN_STRIDE + heads * KEY_SIZE
    queries, rotated = _load_queries(q, offsets, is_member, KEY_SIZE, VALUE_SIZE, COLUMNS, MORE)
    last = length - count + tl.minimum(token, count - 1)
    stop = length - count + tl.minimum(tile_start + ROWS // GROUP, count)
    first_seen = tl.maximum(length - count + tile_start - WINDOW + 1, 0)
    keys += tl.program_id(1) * TILE_STRIDE
    values += tl.program_id(1) * TILE_STRIDE
    page_ids += first_page
    if IN_SPLITS:
        highest, total, sums = nothing_attended(ROWS, COLUMNS)
        index = first_split(first_seen) if WINDOW else tl.full((), 0, tl.int32)
        while split_start(index) < stop:
            start, end = split_start(index), tl.minimum(split_start(index + 1), stop)
            split_highest, split_total, split_sums = _attend_split(
                *(queries, rotated, keys, values, page_ids, start, end, last, first_seen, scale),
                *(PAGE_STRIDE, PAGE_SIZE, KEY_SIZE, VALUE_SIZE, MORE, BLOCK, WINDOW, CAP),
            )
            highest, total, sums = merged(highest, total, sums, split_highest, split_total, split_sums)
            index += 1
    else:
        highest, total, sums = _attend_split(
            *(queries, rotated, keys, values, page_ids, 0, stop, last, first_seen, scale),
            *(PAGE_STRIDE, PAGE_SIZE, KEY_SIZE, VALUE_SIZE, MORE, BLOCK, WINDOW, CAP),
        )
    if SINKS:
        highest, total, sums = with_sinks(highest, total, sums, sinks + heads, is_member)
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
    values: tl.tensor,
    page_starts: tl.tensor,
    last_lengths: tl.tensor,
    page_ids: tl.tensor,
    split_sums: tl.tensor,
    split_marks: tl.tensor,
    scale: tl.tensor,
    max_splits: tl.tensor,
    num_programs: tl.tensor,
    TOKEN_STRIDE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    TILE_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    MORE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    first_page, length = pages_of(row, page_starts, last_lengths, PAGE_SIZE)
    members = tl.arange(0, ROWS)
    heads = tl.program_id(1) * GROUP + members
    is_member = members < GROUP
    if NUM_HEADS % GROUP:
        is_member = is_member & (heads < NUM_HEADS)
    offsets = row * TOKEN_STRIDE + heads * KEY_SIZE
    queries, rotated = _load_queries(q, offsets, is_member, KEY_SIZE, VALUE_SIZE, COLUMNS, MORE)
    last = tl.zeros((ROWS,), tl.int32) + (length - 1)
    first_seen = tl.maximum(length - WINDOW, 0)
    keys += tl.program_id(1) * TILE_STRIDE
    values += tl.program_id(1) * TILE_STRIDE
    page_ids += first_page
    index = tl.program_id(2)
    if WINDOW:
        index += first_split(first_seen)
    while split_start(index) < length:
        start, end = split_start(index), tl.minimum(split_start(index + 1), length)
        highest, total, sums = _attend_split(
            *(queries, rotated, keys, values, page_ids, start, end, last, first_seen, scale),
            *(PAGE_STRIDE, PAGE_SIZE, KEY_SIZE, VALUE_SIZE, MORE, BLOCK, WINDOW, CAP),
        )
        targets = (row * max_splits + index) * NUM_HEADS + heads
        store_split(split_sums, split_marks, targets, highest, total, sums, is_member, VALUE_SIZE)
        index += num_programs


@triton.jit(do_not_specialize=["max_splits"], do_not_specialize_on_alignment=["page_starts", "last_lengths"])
def _merge_kernel(
    split_sums: tl.tensor,
    split_marks: tl.tensor,
    page_starts: tl.tensor,
    last_lengths: tl.tensor,
    out: tl.tensor,
    sinks: tl.tensor,
    max_splits: tl.tensor,
    NUM_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    _, length = pages_of(row, page_starts, last_lengths, PAGE_SIZE)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, COLUMNS)[None, :]
    is_head = heads < NUM_HEADS
    inside = is_head[:, None] & (columns < VALUE_SIZE)
    highest, total, sums = nothing_attended(HEADS, COLUMNS)
    index = first_split(tl.maximum(length - WINDOW, 0)) if WINDOW else tl.full((), 0, tl.int32)
    while split_start(index) < length:
        sources = (row * max_splits + index) * NUM_HEADS + heads
        split_highest = tl.load(split_marks + 2 * sources, mask=is_head, other=0.0)
        split_total = tl.load(split_marks + 2 * sources + 1, mask=is_head, other=1.0)
        split = tl.load(split_sums + sources[:, None] * VALUE_SIZE + columns, mask=inside, other=0.0)
        highest, total, sums = merged(highest, total, sums, split_highest, split_total, split)
        index += 1
    if SINKS:
        highest, total, sums = with_sinks(highest, total, sums, sinks + heads, is_head)
    targets = (row * NUM_HEADS + heads)[:, None] * VALUE_SIZE + columns
    tl.store(out + targets, (sums / total[:, None]).to(out.dtype.element_ty), mask=inside)


_attend = KernelLauncher(_attend_kernel)
_splits = KernelLauncher(_splits_kernel)
_merge = KernelLauncher(_merge_kernel)

_MERGED_HEADS = 4


class AttentionTile(NamedTuple):
    """Query rows of a tile, positions per block, and compile options."""

    rows: int
    block: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, object]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


class HeadGroup(NamedTuple):
    """The tile for a model, and the number of query heads per tile. A tile has as many tokens as fit.

    All kernels that compute splits must use the same tile.
    """

    tile: AttentionTile
    heads: int

    @property
    def tokens(self) -> int:
        return self.tile.rows // self.heads


def head_group(num_heads: int, pool: Pool) -> HeadGroup:
    """Return the tile for H query heads, keys [N, K, S, E] and values [N, K, S, V]."""
    keys, values = pool
    if values.shape[3] < keys.shape[3]:  # latent attention; in fp32 it runs without tensor cores
        tile = AttentionTile(16, 32, 4, 1) if keys.dtype == torch.float32 else AttentionTile(ROWS, BLOCK, 8, 2)
        return HeadGroup(tile, min(num_heads, tile.rows))
    group = num_heads // keys.shape[1]
    rows = max(ROWS, next_power_of_2(group))
    is_wide = next_power_of_2(keys.shape[3]) * keys.itemsize > 256
    return HeadGroup(AttentionTile(rows, BLOCK, 8, 2) if is_wide else AttentionTile(rows, BLOCK, 4, 3), group)


def _sizes(q: Tensor, pool: Pool, group: HeadGroup) -> tuple[int, ...]:
    """Return the constants of the kernels that compute splits, for q [T, H, E]."""
    num_heads, key_size = q.shape[1:]
    _, num_kv_heads, page_size, value_size = pool[1].shape
    head_stride = page_size * key_size
    tile_stride = head_stride if num_kv_heads > 1 else 0  # between the keys of two tiles
    columns, more = (max(next_power_of_2(size), 16) for size in (value_size, key_size - value_size))
    return (
        *(q.stride(0), num_kv_heads * head_stride, tile_stride, num_heads, group.heads, page_size),
        *(key_size, value_size, columns, more if value_size < key_size else 0, group.tile.rows, group.tile.block),
    )


def attend(
    q: Tensor,
    pool: Pool,
    rows: PagedRows,
    tiles: Tensor,
    *,
    scale: float,
    out: Tensor,
    rules: ScoreRules = NO_RULES,
    in_splits: bool = True,
) -> None:
    """Attend with q [T, H, E] to keys [N, K, S, E] and values [N, K, S, V] into ``out`` [T, H, V].

    Args:
        tiles: [Y, 2] int32, (row, first token within the row) of each tile.
        in_splits: False: compute rows without splits, which is faster, but differs from ``attend_splits``.
    """
    group = head_group(q.shape[1], pool)
    sizes = *_sizes(q, pool, group), rules.window or 0, rules.cap, rules.sinks is not None, in_splits
    sinks = out if rules.sinks is None else rules.sinks
    tensors = (q, *pool, rows.query_starts, rows.page_starts, rows.last_lengths, rows.page_ids, tiles, out, sinks)
    key = (q.dtype, sizes, rules.sinks_key, *alignments(q, *pool, out))
    grid = tiles.shape[0], -(-q.shape[1] // group.heads), 1
    _attend(grid, key, (*tensors, rules.factor(scale), *sizes), group.tile.options)


class SplitPlan(NamedTuple):
    """How rows of one token are split: ``max_splits`` of the longest row; programs per row and tile."""

    max_splits: int
    num_programs: int


def attend_splits(
    q: Tensor,
    pool: Pool,
    rows: PagedRows,
    splits: SplitPlan,
    *,
    scale: float,
    out: Tensor,
    rules: ScoreRules = NO_RULES,
) -> None:
    """Compute ``attend`` with the same bits for R rows of one token, q [R, H, E] and out [R, H, V]."""
    num_rows, num_heads, value_size = out.shape
    max_splits, num_programs = splits
    sums = torch.empty(num_rows, max_splits, num_heads, value_size, dtype=torch.float32, device=q.device)
    stats = torch.empty(num_rows, max_splits, num_heads, 2, dtype=torch.float32, device=q.device)
    group, window = head_group(num_heads, pool), rules.window or 0
    sizes = *_sizes(q, pool, group), window, rules.cap
    tensors = (q, *pool, rows.page_starts, rows.last_lengths, rows.page_ids, sums, stats)
    numbers = rules.factor(scale), max_splits, num_programs
    grid = num_rows, -(-num_heads // group.heads), num_programs
    key = (q.dtype, sizes, *alignments(q, *pool, sums, stats))
    _splits(grid, key, (*tensors, *numbers, *sizes), group.tile.options)
    page_size, columns = pool[0].shape[2], max(next_power_of_2(value_size), 16)
    sizes = num_heads, page_size, value_size, columns, _MERGED_HEADS, window, rules.sinks is not None
    tensors = sums, stats, rows.page_starts, rows.last_lengths, out, out if rules.sinks is None else rules.sinks
    key = (out.dtype, sizes, rules.sinks_key, *alignments(sums, stats, out))
    _merge((num_rows, -(-num_heads // _MERGED_HEADS), 1), key, (*tensors, max_splits, *sizes), {"num_warps": 4})
