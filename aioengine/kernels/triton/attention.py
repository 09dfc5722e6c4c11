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

T tokens, R rows, H query heads, K kv heads, E head size, N pages of the pool, S page size, X splits of the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from aioengine.kernels.triton.launcher import KernelLauncher, next_power_of_2
from aioengine.kernels.triton.scores import NO_RULES, capped, with_sinks

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.kernels.triton.scores import ScoreRules

SPLIT = tl.constexpr(256)
"""Positions per split at the start of a row. Splits are multiples of ``BLOCK``."""
EVEN_SPLITS = tl.constexpr(32)
"""Number of splits of this size. After that, each doubling of the positions has half as many splits."""
ROWS = 64
"""Query rows of a tile, unless one token has more. 64 is the minimum for Hopper's tensor cores."""
BLOCK = 64
MASKED = tl.constexpr(-1.0e30)


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
    HEAD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the highest score, sum of weights and weighted values of each query row over positions start to stop. A
    query row attends to positions up to ``last``. first_seen: the first position that any query row attends to.
    """
    COLUMNS: tl.constexpr = queries.shape[1]
    columns = tl.arange(0, COLUMNS)[None, :]
    highest = tl.full((queries.shape[0],), MASKED, tl.float32)
    total = tl.zeros((queries.shape[0],), tl.float32)
    sums = tl.zeros(queries.shape, tl.float32)
    if WINDOW:
        start += tl.maximum(first_seen - start, 0) // BLOCK * BLOCK
    for first in tl.range(start, stop, BLOCK):
        positions = first + tl.arange(0, BLOCK)
        inside = positions < stop
        if WINDOW:
            inside = inside & (positions >= first_seen)
        pages = tl.load(page_ids + positions // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        offsets = (pages * PAGE_STRIDE + positions % PAGE_SIZE * HEAD_SIZE)[:, None] + columns
        there = inside[:, None] & (columns < HEAD_SIZE)
        block_keys = tl.load(keys + offsets, mask=there, other=0.0)
        scores = tl.dot(queries, tl.trans(block_keys), input_precision="ieee") * scale
        if CAP > 0.0:
            scores = capped(scores, CAP)
        is_seen = positions[None, :] <= last[:, None]
        if WINDOW:
            is_seen = is_seen & (positions[None, :] > last[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, MASKED)
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = tl.fma(total, shrink, tl.sum(weights, 1))
        block_values = tl.load(values + offsets, mask=there, other=0.0)
        sums = tl.dot(weights.to(block_values.dtype), block_values, sums * shrink[:, None], input_precision="ieee")
        highest = higher
    return highest, total, sums


@triton.jit
def merged(
    highest: tl.tensor,
    total: tl.tensor,
    sums: tl.tensor,
    split_highest: tl.tensor,
    split_total: tl.tensor,
    split_sums: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Merge the next split into the result of the previous splits. FMAs are explicit, so that the compiler cannot fuse
    operations differently in two kernels.
    """
    higher = tl.maximum(highest, split_highest)
    shrink = tl.exp2(highest - higher)
    weight = tl.exp2(split_highest - higher)
    total = tl.fma(split_total, weight, total * shrink)
    sums = tl.fma(split_sums, tl.broadcast_to(weight[:, None], sums.shape), sums * shrink[:, None])
    return higher, total, sums


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
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    row = tl.load(tiles + 2 * tl.program_id(0))
    tile_start = tl.load(tiles + 2 * tl.program_id(0) + 1)
    head = tl.program_id(1)
    first_token = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - first_token
    first_page, length = pages_of(row, page_starts, last_lengths, PAGE_SIZE)
    PAGE_STRIDE: tl.constexpr = NUM_KV_HEADS * PAGE_SIZE * HEAD_SIZE
    members = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)[None, :]
    token = tile_start + members // GROUP
    is_member = (members < ROWS // GROUP * GROUP) & (token < count)
    heads = head * GROUP + members % GROUP
    inside = is_member[:, None] & (columns < HEAD_SIZE)
    tokens = (first_token + token).to(tl.int64)
    queries = tl.load(q + (tokens * TOKEN_STRIDE + heads * HEAD_SIZE)[:, None] + columns, mask=inside, other=0.0)
    last = length - count + tl.minimum(token, count - 1)
    stop = length - count + tl.minimum(tile_start + ROWS // GROUP, count)
    highest = tl.full((ROWS,), MASKED, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    head_keys = keys + head * PAGE_SIZE * HEAD_SIZE
    head_values = values + head * PAGE_SIZE * HEAD_SIZE
    first_seen = tl.maximum(length - count + tile_start - WINDOW + 1, 0)
    index = first_split(first_seen) if WINDOW else tl.full((), 0, tl.int32)
    while split_start(index) < stop:
        start, end = split_start(index), tl.minimum(split_start(index + 1), stop)
        split_highest, split_total, split_sums = _attend_split(
            *(queries, head_keys, head_values, page_ids + first_page, start, end, last, first_seen),
            *(scale, PAGE_STRIDE, PAGE_SIZE, HEAD_SIZE, BLOCK, WINDOW, CAP),
        )
        highest, total, sums = merged(highest, total, sums, split_highest, split_total, split_sums)
        index += 1
    if SINKS:
        highest, total, sums = with_sinks(highest, total, sums, sinks + heads, is_member)
    targets = (tokens * (NUM_KV_HEADS * GROUP) + heads)[:, None] * HEAD_SIZE + columns
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
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first_page, length = pages_of(row, page_starts, last_lengths, PAGE_SIZE)
    PAGE_STRIDE: tl.constexpr = NUM_KV_HEADS * PAGE_SIZE * HEAD_SIZE
    members = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)[None, :]
    is_member = members < GROUP
    inside = is_member[:, None] & (columns < HEAD_SIZE)
    heads = head * GROUP + members
    queries = tl.load(q + row * TOKEN_STRIDE + (heads * HEAD_SIZE)[:, None] + columns, mask=inside, other=0.0)
    last = tl.zeros((ROWS,), tl.int32) + (length - 1)
    head_keys = keys + head * PAGE_SIZE * HEAD_SIZE
    head_values = values + head * PAGE_SIZE * HEAD_SIZE
    index = tl.program_id(2)
    first_seen = tl.maximum(length - WINDOW, 0)
    if WINDOW:
        index += first_split(first_seen)
    while split_start(index) < length:
        start, end = split_start(index), tl.minimum(split_start(index + 1), length)
        highest, total, sums = _attend_split(
            *(queries, head_keys, head_values, page_ids + first_page, start, end, last, first_seen),
            *(scale, PAGE_STRIDE, PAGE_SIZE, HEAD_SIZE, BLOCK, WINDOW, CAP),
        )
        targets = (row * max_splits + index) * (NUM_KV_HEADS * GROUP) + heads
        tl.store(split_marks + 2 * targets, highest, mask=is_member)
        tl.store(split_marks + 2 * targets + 1, total, mask=is_member)
        tl.store(split_sums + targets[:, None] * HEAD_SIZE + columns, sums, mask=inside)
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
    HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    num_pages = tl.load(page_starts + row + 1) - tl.load(page_starts + row)
    length = (num_pages - 1) * PAGE_SIZE + tl.load(last_lengths + row)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, COLUMNS)[None, :]
    is_head = heads < NUM_HEADS
    inside = is_head[:, None] & (columns < HEAD_SIZE)
    highest = tl.full((HEADS,), MASKED, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    sums = tl.zeros((HEADS, COLUMNS), tl.float32)
    index = first_split(tl.maximum(length - WINDOW, 0)) if WINDOW else tl.full((), 0, tl.int32)
    while split_start(index) < length:
        sources = (row * max_splits + index) * NUM_HEADS + heads
        split_highest = tl.load(split_marks + 2 * sources, mask=is_head, other=0.0)
        split_total = tl.load(split_marks + 2 * sources + 1, mask=is_head, other=1.0)
        split = tl.load(split_sums + sources[:, None] * HEAD_SIZE + columns, mask=inside, other=0.0)
        highest, total, sums = merged(highest, total, sums, split_highest, split_total, split)
        index += 1
    if SINKS:
        highest, total, sums = with_sinks(highest, total, sums, sinks + heads, is_head)
    targets = (row * NUM_HEADS + heads)[:, None] * HEAD_SIZE + columns
    tl.store(out + targets, (sums / total[:, None]).to(out.dtype.element_ty), mask=inside)


_attend = KernelLauncher(_attend_kernel)
_splits = KernelLauncher(_splits_kernel)
_merge = KernelLauncher(_merge_kernel)

_MERGED_HEADS = 4


def rows_of_tile(group: int) -> int:
    """Return the number of query rows per tile, for ``group`` query heads per kv head."""
    return max(ROWS, next_power_of_2(group))


def tokens_of_tile(group: int) -> int:
    """Return the number of tokens per tile, for ``group`` query heads per kv head."""
    return rows_of_tile(group) // group


def _options(head_size: int, dtype: torch.dtype) -> dict[str, object]:
    """Return the compile options of all kernels that compute splits, which must be equal."""
    is_wide = next_power_of_2(head_size) * dtype.itemsize > 256
    return {"num_warps": 8 if is_wide else 4, "num_stages": 2 if is_wide else 3}


def _sizes(q: Tensor, pool: tuple[Tensor, Tensor]) -> tuple[int, ...]:
    """Return the constants of the kernels that compute splits, for q [T, H, E], keys and values [N, K, S, E]."""
    _, num_kv_heads, page_size, head_size = pool[0].shape
    group, columns = q.shape[1] // num_kv_heads, max(next_power_of_2(head_size), 16)
    return q.stride(0), num_kv_heads, group, page_size, head_size, columns, rows_of_tile(group), BLOCK


def attend(
    q: Tensor,
    pool: tuple[Tensor, Tensor],
    rows: PagedRows,
    tiles: Tensor,
    *,
    scale: float,
    out: Tensor,
    rules: ScoreRules = NO_RULES,
) -> None:
    """Attend with q [T, H, E] to keys and values [N, K, S, E] into ``out`` [T, H, E].

    tiles: [X, 2] int32, (row, first token within the row) of each tile.
    """
    sizes = _sizes(q, pool)
    sizes = *sizes, rules.window or 0, rules.cap, rules.sinks is not None
    sinks = out if rules.sinks is None else rules.sinks
    tensors = (q, *pool, rows.query_starts, rows.page_starts, rows.last_lengths, rows.page_ids, tiles, out, sinks)
    key = (q.dtype, sizes, rules.sinks_key, *(tensor.data_ptr() % 16 for tensor in (q, *pool, out)))
    options = _options(q.shape[2], q.dtype)
    _attend((tiles.shape[0], pool[0].shape[1], 1), key, (*tensors, rules.factor(scale), *sizes), options)


class SplitPlan(NamedTuple):
    """How rows of one token are split: ``max_splits`` of the longest row; programs per row and kv head."""

    max_splits: int
    num_programs: int


def attend_splits(
    q: Tensor,
    pool: tuple[Tensor, Tensor],
    rows: PagedRows,
    splits: SplitPlan,
    *,
    scale: float,
    out: Tensor,
    rules: ScoreRules = NO_RULES,
) -> None:
    """Compute ``attend`` with the same bits for R rows of one token, q and out [R, H, E]."""
    num_rows, num_heads, head_size = q.shape
    max_splits, num_programs = splits
    sums = torch.empty(num_rows, max_splits, num_heads, head_size, dtype=torch.float32, device=q.device)
    stats = torch.empty(num_rows, max_splits, num_heads, 2, dtype=torch.float32, device=q.device)
    sizes = *_sizes(q, pool), rules.window or 0, rules.cap
    tensors = (q, *pool, rows.page_starts, rows.last_lengths, rows.page_ids, sums, stats)
    alignments = tuple(tensor.data_ptr() % 16 for tensor in (q, *pool, sums, stats))
    options = _options(head_size, q.dtype)
    grid = num_rows, pool[0].shape[1], num_programs
    numbers = rules.factor(scale), max_splits, num_programs
    _splits(grid, (q.dtype, sizes, alignments), (*tensors, *numbers, *sizes), options)
    merge_splits(sums, stats, rows, out, max_splits=max_splits, page_size=pool[0].shape[2], rules=rules)


def merge_splits(
    sums: Tensor,
    stats: Tensor,
    rows: PagedRows,
    out: Tensor,
    *,
    max_splits: int,
    page_size: int,
    rules: ScoreRules = NO_RULES,
) -> None:
    """Merge the splits of R rows of one token into ``out`` [R, H, E].

    Args:
        sums: [R, X, H, E] fp32, the weighted values of each split.
        stats: [R, X, H, 2] fp32, the highest score and the sum of weights of each split.
    """
    num_rows, num_heads, head_size = out.shape
    sizes = num_heads, page_size, head_size, max(next_power_of_2(head_size), 16), _MERGED_HEADS
    sizes = *sizes, rules.window or 0, rules.sinks is not None
    tensors = sums, stats, rows.page_starts, rows.last_lengths, out, out if rules.sinks is None else rules.sinks
    key = (out.dtype, sizes, rules.sinks_key, *(tensor.data_ptr() % 16 for tensor in (sums, stats, out)))
    grid = num_rows, -(-num_heads // _MERGED_HEADS), 1
    _merge(grid, key, (*tensors, max_splits, *sizes), {"num_warps": 4})
