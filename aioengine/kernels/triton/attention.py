"""Batch-invariant attention over pages on a GPU: softmax(q k^T * scale) v, q [T, H, E] -> [T, H, V].

The positions of a row are divided into blocks. The softmax of a block is computed alone, and blocks are merged in
order, in decode steps and in prefill chunks. So neither the batch nor chunks, prefix hits or preemption change a bit of
the result. A split is what one program of a decode step computes: one of the first ``EVEN_SPLITS`` blocks of a row, or
several later blocks. After the even splits, each doubling of the positions has 8 splits, so that long rows do not have
too many. The blocks of a split are merged first, then the splits.

In 16 bits, tiles of decode steps have fewer query rows than tiles of prefill chunks. This does not change a bit: tensor
cores add in the same order for every number of rows. They also add the weights of a block, because the order in which
threads add depends on the tile. In fp32 and with fp8 keys, small tiles give other bits, so all tiles have the same
number of rows.

With a window, splits and blocks that no token of a tile sees are skipped. This does not change a bit either, because
the weights of positions before the window become exactly zero at the first visible position.

A tile is several tokens of one row with all query heads of one kv head. ``attend`` computes the splits of a tile one
after the other; on Hopper, ``prompt_attention.py`` does this faster for most prompts. ``attend_splits`` is for few rows
of one token; it computes their splits in parallel.

The kernels also compute latent attention (arXiv 2405.04434) in its absorbed form: all query heads share one key per
position, and the value is the first part of the key. So a key is read once, for the scores and for the weighted sums.
A tile then has all heads of several tokens, or a part of the heads of one token.

T tokens, R rows, H query heads, K kv heads, E key size, V value size (E without latent attention), N pages of the pool,
S page size, X splits of the longest row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.triton.dependent import is_last, start_next_and_wait
from aioengine.kernels.triton.launcher import alignments, dtypes, has_dependent_launch, kernel, next_power_of_2, options
from aioengine.kernels.triton.scores import (
    MASKED,
    NO_RULES,
    ScoreRules,
    capped,
    fp16_queries,
    merged,
    nothing_attended,
    store_attended,
    store_split,
    with_split,
)

Pool = tuple[Tensor, Tensor]

EVEN_SPLITS = tl.constexpr(64)
"""Number of splits of one block at the start of a row."""
LATENT_BLOCKS = 4
"""Blocks of an even split in latent attention."""
PER_DOUBLING = tl.constexpr(8)
"""Number of splits of each further doubling of the positions."""
ROWS = 64
"""Query rows of a tile, unless one token has more. 64 is the minimum for Hopper's fastest instructions."""
DECODE_ROWS = 16
"""Query rows of a tile of a decode step in 16 bits."""
BLOCK = 64
"""Positions of a block."""
LARGE = 128
"""Query rows and block of a tile in 16 bits on Hopper and newer, which have enough shared memory and registers."""
MAX_SHORT_LENGTH = EVEN_SPLITS.value * LARGE
"""Positions of a row whose splits have one block of ``LARGE`` positions."""
ONES = tl.constexpr(8)
"""Columns of a matrix of ones, by which weights are multiplied to add them: the minimum for tensor cores."""


class PagedRows(NamedTuple):
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


def num_splits(length: int, size: int) -> int:
    """Return the number of splits of a row of ``length`` positions. size: positions of an even split."""
    even, splits = -(-length // size), EVEN_SPLITS.value
    if even <= splits:
        return even
    doublings = (even - 1).bit_length() - splits.bit_length()  # before the last split
    later_size = splits // PER_DOUBLING.value << doublings
    return splits + PER_DOUBLING.value * (doublings - 1) + -(-even // later_size)


@triton.jit
def split_start(index: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return the first position of a split. SIZE: positions of an even split."""
    later = tl.maximum(index - EVEN_SPLITS, 0)
    start = (PER_DOUBLING + later % PER_DOUBLING) * (EVEN_SPLITS // PER_DOUBLING) << later // PER_DOUBLING
    return tl.where(index < EVEN_SPLITS, index, start) * SIZE


@triton.jit
def split_of(position: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return the split that contains a position."""
    even = position // SIZE
    doublings = tl.full((), 0, tl.int32)
    while even >= 2 * EVEN_SPLITS << doublings:
        doublings += 1
    later = (even >> doublings) // (EVEN_SPLITS // PER_DOUBLING) + PER_DOUBLING * (doublings - 1) + EVEN_SPLITS
    return tl.where(even < EVEN_SPLITS, even, later)


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


class _Sizes(NamedTuple):
    """Constants of the kernels that compute splits. Strides are in elements.

    Attributes:
        token_stride, page_stride: of the queries and of the pool. tile_stride: between the keys of two tiles.
        group: query heads per tile.
        columns: ``value_size``, padded. more: size of the rest of a key, padded; 0: values are as large as keys.
        rows, block: query rows of a tile, and positions that it loads at a time. split: positions of an even split.
        window: 0: no window. cap: see ``ScoreRules.cap``.
    """

    token_stride: int
    page_stride: int
    tile_stride: int
    num_heads: int
    group: int
    page_size: int
    key_size: int
    value_size: int
    columns: int
    more: int
    rows: int
    block: int
    split: int
    window: int
    cap: float


@triton.jit
def _attend_block(
    whole: tl.tuple, block: tl.tuple, inputs: tl.tuple, page_ids: tl.tensor, first: tl.tensor, seen: tl.tuple,
    SIZES: tl.constexpr, HAS_MASK: tl.constexpr,
) -> tuple[tl.tuple, tl.tuple]:  # fmt: skip
    """Merge the previous block into ``whole``. Return it and the state of the block of positions from ``first``.

    HAS_MASK: some query rows do not attend to all of it. The previous block is merged late, so that tensor cores
    compute its weighted sums and the new scores without a pause. In latent attention, whose sums are too large for two
    states, the block is added to the state of the previous blocks instead, and ``whole`` is returned unchanged.
    """
    queries, rotated, keys, values, scale = inputs
    last, first_seen, stop = seen
    columns = tl.arange(0, queries.shape[1])[None, :]
    positions = first + tl.arange(0, SIZES.block)
    inside = positions < stop if HAS_MASK else positions >= 0
    if SIZES.window:
        inside = inside & (positions >= first_seen)
    pages = tl.load(page_ids + positions // SIZES.page_size, mask=inside, other=0).to(tl.int64)
    sources = (pages * SIZES.page_stride + positions % SIZES.page_size * SIZES.key_size)[:, None]
    there = inside[:, None] & (columns < SIZES.value_size)
    part = tl.load(keys + (sources + columns), mask=there, other=0.0).to(queries.dtype)
    if SIZES.more:
        rest = keys + (sources + SIZES.value_size)
        others = load_part(rest, inside, SIZES.key_size - SIZES.value_size, SIZES.more)
        scores = tl.dot(rotated, tl.trans(others), input_precision="ieee")
        scores = tl.dot(queries, tl.trans(part), scores, input_precision="ieee")
    else:
        scores = tl.dot(queries, tl.trans(part), input_precision="ieee")
        whole = merged(whole, _totaled(block))
    if SIZES.cap > 0.0:
        scores, scale = capped(scores * scale[:, None], SIZES.cap), tl.full(scale.shape, 1.0, tl.float32)
    if HAS_MASK:
        is_seen = positions[None, :] <= last[:, None]
        if SIZES.window:
            is_seen = is_seen & (positions[None, :] > last[:, None] - SIZES.window)
        scores = tl.where(is_seen, scores, float("-inf"))
    highest = tl.maximum(tl.max(scores, 1) * scale, block[0] if SIZES.more else MASKED)
    factors, offsets = tl.broadcast_to(scale[:, None], scores.shape), tl.broadcast_to(-highest[:, None], scores.shape)
    weights = tl.exp2(tl.fma(scores, factors, offsets)).to(queries.dtype)
    ones = tl.full((positions.shape[0], ONES), 1.0, queries.dtype)
    if SIZES.more:
        shrink = tl.exp2(block[0] - highest)[:, None]
        totals = tl.dot(weights, ones, block[1] * shrink, input_precision="ieee")
        sums = tl.dot(weights, part, block[2] * shrink, input_precision="ieee")
    else:
        totals = tl.dot(weights, ones, input_precision="ieee")
        part = tl.load(values + (sources + columns), mask=there, other=0.0).to(queries.dtype)
        sums = tl.dot(weights, part, input_precision="ieee")
    return whole, (highest, totals, sums)


@triton.jit
def _totaled(block: tl.tuple) -> tl.tuple:
    """Return the state of a block as ``merged`` takes it."""
    highest, totals, sums = block
    return highest, tl.max(totals, 1), sums


@triton.jit
def _attend_positions(
    inputs: tl.tuple, page_ids: tl.tensor, start: tl.tensor, stop: tl.tensor, last: tl.tensor, first_seen: tl.tensor,
    all_see: tl.tensor,
    SIZES: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Return the state of each query row after positions start to stop (see ``nothing_attended``). A query row attends
    to positions up to ``last``. inputs: see ``_tile_inputs``. first_seen: the first position that any query row attends
    to. all_see: all query rows attend to the positions before this one, unless there is a window; None: not used. One
    loop is faster for few blocks.
    """
    whole = nothing_attended(SIZES.rows, SIZES.columns)
    block = whole[0], tl.zeros((inputs[0].shape[0], ONES), tl.float32), whole[2]
    seen = last, first_seen, stop
    if SIZES.window:
        start += tl.maximum(first_seen - start, 0) // SIZES.block * SIZES.block
    elif all_see is not None:
        masked = start + tl.maximum(tl.minimum(all_see, stop) - start, 0) // SIZES.block * SIZES.block
        for first in tl.range(start, masked, SIZES.block):
            whole, block = _attend_block(whole, block, inputs, page_ids, first, seen, SIZES, False)
        start = masked
    for first in tl.range(start, stop, SIZES.block):
        whole, block = _attend_block(whole, block, inputs, page_ids, first, seen, SIZES, True)
    return _totaled(block) if SIZES.more else merged(whole, _totaled(block))


@triton.jit
def _tile_inputs(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, tokens: tl.tensor, heads: tl.tensor, is_member: tl.tensor,
    scales: tl.tensor, scale: tl.tensor,
    SIZES: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Return the first ``value_size`` elements of the queries, the rest if there is one, the addresses of the tile's
    keys and values, and the factor of dot products.
    """
    pointers = q + (tokens * SIZES.token_stride + heads * SIZES.key_size)[:, None]
    queries = load_part(pointers, is_member, SIZES.value_size, SIZES.columns)
    rest = queries
    if SIZES.more:
        rest = load_part(pointers + SIZES.value_size, is_member, SIZES.key_size - SIZES.value_size, SIZES.more)
    if scales is not None:
        scale *= tl.load(scales)
    if keys.dtype.element_ty.is_fp8():
        queries, scale = fp16_queries(queries, scale)
    offset = tl.program_id(1) * SIZES.tile_stride
    # a number, or [G, 1] from ``fp16_queries`` -> [G]
    scale = tl.reshape(tl.zeros((heads.shape[0], 1), tl.float32) + scale, heads.shape)
    return queries, rest, keys + offset, values + offset, scale


@triton.jit
def _is_member(is_token: tl.tensor, heads: tl.tensor, SIZES: tl.constexpr) -> tl.tensor:
    """Return which query rows of a tile exist. The last tile of a token may have fewer heads."""
    return is_token & (heads < SIZES.num_heads) if SIZES.num_heads % SIZES.group else is_token


@triton.jit
def tokens_of(
    tiles: tl.tensor, index: tl.tensor, query_starts: tl.tensor, page_starts: tl.tensor, last_lengths: tl.tensor,
    PAGE_SIZE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Return the start of a tile in its row; the first token, number of tokens, first page and length of the row."""
    row = tl.load(tiles + 2 * index)
    tile_start = tl.load(tiles + 2 * index + 1)
    first_token = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - first_token
    first_page, length = pages_of(row, page_starts, last_lengths, PAGE_SIZE)
    return tile_start, first_token, count, first_page, length


@kernel(do_not_specialize_on_alignment=["query_starts", "page_starts", "last_lengths", "page_ids", "tiles"])
def _attend_kernel(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, query_starts: tl.tensor, page_starts: tl.tensor,
    last_lengths: tl.tensor, page_ids: tl.tensor, tiles: tl.tensor, out: tl.tensor, sinks: tl.tensor,
    scales: tl.tensor, scale: tl.tensor,
    SIZES: tl.constexpr, IN_SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """Attend with the query rows of one tile, for the heads of one kv head. IN_SPLITS: as in ``_splits_kernel``."""
    start_next_and_wait()
    TOKENS: tl.constexpr = SIZES.rows // SIZES.group
    tile_start, first_token, count, first_page, length = tokens_of(
        tiles, tl.program_id(0), query_starts, page_starts, last_lengths, SIZES.page_size
    )
    members = tl.arange(0, SIZES.rows)
    token = tile_start + members // SIZES.group
    heads = tl.program_id(1) * SIZES.group + members % SIZES.group
    is_member = _is_member((members < TOKENS * SIZES.group) & (token < count), heads, SIZES)
    tokens = (first_token + token).to(tl.int64)
    inputs = _tile_inputs(q, keys, values, tokens, heads, is_member, scales, scale, SIZES)
    last = length - count + tl.minimum(token, count - 1)
    stop = length - count + tl.minimum(tile_start + TOKENS, count)
    all_see = length - count + tile_start + 1
    first_seen = tl.maximum(all_see - SIZES.window, 0)
    page_ids += first_page
    # splits of one block are merged as blocks: one loop needs no registers for a third state
    FIRST: tl.constexpr = 1 if SIZES.more else EVEN_SPLITS
    end = tl.minimum(split_start(FIRST, SIZES.split), stop) if IN_SPLITS else stop
    state = _attend_positions(inputs, page_ids, 0, end, last, first_seen, all_see, SIZES)
    if IN_SPLITS:
        index = tl.full((), FIRST, tl.int32)
        if SIZES.window:
            index = tl.maximum(index, split_of(first_seen, SIZES.split))
        while split_start(index, SIZES.split) < stop:
            start, end = split_start(index, SIZES.split), tl.minimum(split_start(index + 1, SIZES.split), stop)
            split = _attend_positions(inputs, page_ids, start, end, last, first_seen, all_see, SIZES)
            state = merged(state, split)
            index += 1
    targets = tokens * SIZES.num_heads + heads
    store_attended(out, targets, is_member, state, sinks, heads, scales, SIZES.value_size)


@kernel(
    do_not_specialize=["max_splits", "num_programs", "max_alone"],
    do_not_specialize_on_alignment=["page_starts", "last_lengths", "page_ids", "num_done"],
)
def _splits_kernel(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, page_starts: tl.tensor, last_lengths: tl.tensor,
    page_ids: tl.tensor, num_done: tl.tensor, split_sums: tl.tensor, split_stats: tl.tensor, out: tl.tensor,
    sinks: tl.tensor, scales: tl.tensor, scale: tl.tensor, max_splits: tl.tensor, num_programs: tl.tensor,
    max_alone: tl.tensor,
    SIZES: tl.constexpr,
) -> None:  # fmt: skip
    """Compute every ``num_programs``-th split of a tile. The program that finishes last merges all splits. The first
    program alone computes a row of up to ``max_alone`` positions.
    """
    start_next_and_wait()
    row = tl.program_id(0).to(tl.int64)
    first_page, length = pages_of(row, page_starts, last_lengths, SIZES.page_size)
    members = tl.arange(0, SIZES.rows)
    heads = tl.program_id(1) * SIZES.group + members
    is_member = _is_member(members < SIZES.group, heads, SIZES)
    inputs = _tile_inputs(q, keys, values, row, heads, is_member, scales, scale, SIZES)
    last = tl.zeros_like(members) + (length - 1)
    first_seen = tl.maximum(length - SIZES.window, 0)
    page_ids += first_page
    first_index = split_of(first_seen, SIZES.split) if SIZES.window else tl.full((), 0, tl.int32)
    index, end_index = first_index + tl.program_id(2), split_of(length - 1, SIZES.split) + 1
    if length <= max_alone:
        if tl.program_id(2) == 0:
            whole = _attend_positions(inputs, page_ids, 0, length, last, first_seen, None, SIZES)
            targets = row * SIZES.num_heads + heads
            store_attended(out, targets, is_member, whole, sinks, heads, scales, SIZES.value_size)
    elif index < end_index:
        num_used = tl.minimum(num_programs, end_index - first_index)
        while index < end_index:
            start, end = split_start(index, SIZES.split), tl.minimum(split_start(index + 1, SIZES.split), length)
            state = _attend_positions(inputs, page_ids, start, end, last, first_seen, None, SIZES)
            targets = (row * max_splits + index) * SIZES.num_heads + heads
            store_split(split_sums, split_stats, targets, state, is_member, SIZES.value_size)
            index += num_programs
        done = num_done + row * tl.num_programs(1) + tl.program_id(1)
        if is_last(done, num_used):
            tl.store(done, 0)
            whole = nothing_attended(SIZES.rows, SIZES.columns)
            for other in tl.range(first_index, end_index, loop_unroll_factor=4):
                sources = (row * max_splits + other) * SIZES.num_heads + heads
                whole = with_split(whole, split_sums, split_stats, sources, is_member, SIZES.value_size)
            targets = row * SIZES.num_heads + heads
            store_attended(out, targets, is_member, whole, sinks, heads, scales, SIZES.value_size)


class AttentionTile(NamedTuple):
    """Query rows of a tile, positions per block, and compile options."""

    rows: int
    block: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, object]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    @property
    def launch_options(self) -> dict[str, object]:
        """``options``, and the options of the kernels in this file. Without fused multiply-add, blocks with and without
        a mask have the same bits.
        """
        return options(self.num_warps, fuses=False) | self.options


class HeadGroup(NamedTuple):
    """The tiles of a model, with as many tokens as fit.

    tile: for several tokens of a row. decode_tile: for one token. heads: query heads per tile.
    """

    tile: AttentionTile
    decode_tile: AttentionTile
    heads: int

    @property
    def tokens(self) -> int:
        return self.tile.rows // self.heads


def head_group(num_heads: int, pool: Pool) -> HeadGroup:
    """Return the tiles for H query heads, keys [N, K, S, E] and values [N, K, S, V]."""
    keys, values = pool
    if values.shape[3] < keys.shape[3]:  # latent attention; in fp32 it runs without tensor cores
        tile = AttentionTile(16, 32, 4, 1) if keys.dtype == torch.float32 else AttentionTile(ROWS, BLOCK, 8, 2)
        return HeadGroup(tile, tile, min(num_heads, tile.rows))
    group = num_heads // keys.shape[1]
    min_rows = next_power_of_2(group)
    is_wide = next_power_of_2(keys.shape[3]) * max(keys.itemsize, 2) > 256
    tile = AttentionTile(max(ROWS, min_rows), BLOCK, *((8, 2) if is_wide else (4, 3)))
    if keys.dtype == torch.float32 or keys.itemsize == 1:
        return HeadGroup(tile, tile, group)
    if has_dependent_launch() and not is_wide:
        tile = AttentionTile(max(LARGE, min_rows), LARGE, 8, 5)
    return HeadGroup(tile, AttentionTile(max(DECODE_ROWS, min_rows), tile.block, 4, 2), group)


def split_size(pool: Pool, tile: AttentionTile) -> int:
    """Return the positions of an even split. In latent attention, a split has several blocks."""
    return tile.block * LATENT_BLOCKS if pool[1].shape[3] < pool[0].shape[3] else tile.block


def _sizes(q: Tensor, pool: Pool, heads: int, tile: AttentionTile, rules: ScoreRules) -> _Sizes:
    """Return the constants of the kernels for q [T, H, E], and tiles of these query heads."""
    num_heads, key_size = q.shape[1:]
    _, num_kv_heads, page_size, value_size = pool[1].shape
    head_stride = page_size * key_size
    columns, more = (max(next_power_of_2(size), 16) for size in (value_size, key_size - value_size))
    return _Sizes(
        token_stride=q.stride(0),
        page_stride=num_kv_heads * head_stride,
        tile_stride=head_stride if num_kv_heads > 1 else 0,
        num_heads=num_heads,
        group=heads,
        page_size=page_size,
        key_size=key_size,
        value_size=value_size,
        columns=columns,
        more=more if value_size < key_size else 0,
        rows=tile.rows,
        block=tile.block,
        split=split_size(pool, tile),
        window=rules.window or 0,
        cap=rules.cap,
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
        tiles: [Y, 2] int32, (row, first token within the row) of each tile. If there are T, each has one token.
        in_splits: False: compute rows without splits, which is faster, but differs from ``attend_splits``.
    """
    group = head_group(q.shape[1], pool)
    tile = group.decode_tile if len(tiles) == len(q) else group.tile
    sizes = _sizes(q, pool, group.heads, tile, rules)
    tensors = (q, *pool, rows.query_starts, rows.page_starts, rows.last_lengths, rows.page_ids, tiles, out, rules.sinks)
    key = (*dtypes(q, pool[0]), sizes, in_splits, rules.tensors_key, *alignments(q, *pool, out))
    grid = tiles.shape[0], -(-q.shape[1] // group.heads), 1
    _attend_kernel(grid, key, (*tensors, rules.scales, rules.factor(scale), sizes, in_splits), tile.launch_options)


def attend_splits(
    q: Tensor,
    pool: Pool,
    rows: PagedRows,
    num_done: Tensor,
    *,
    max_splits: int,
    num_programs: int,
    max_alone: int = 0,
    scale: float,
    out: Tensor,
    rules: ScoreRules = NO_RULES,
) -> None:
    """Compute ``attend`` with the same bits for R rows of one token, q [R, H, E] and out [R, H, V].

    Args:
        num_done: [R * H] int32 counters, which are zeros before and after.
        max_splits: of the longest row.
        num_programs: per row and tile. max_alone: one program computes rows of up to this length. Not in latent
            attention.
    """
    num_rows, num_heads, value_size = out.shape
    sums = torch.empty(num_rows, max_splits, num_heads, value_size, dtype=torch.float32, device=q.device)
    stats = torch.empty(num_rows, max_splits, num_heads, 2, dtype=torch.float32, device=q.device)
    group = head_group(num_heads, pool)
    sizes = _sizes(q, pool, group.heads, group.decode_tile, rules)
    tensors = (q, *pool, rows.page_starts, rows.last_lengths, rows.page_ids, num_done, sums, stats, out, rules.sinks)
    numbers = rules.scales, rules.factor(scale), max_splits, num_programs, max_alone
    grid = num_rows, -(-num_heads // group.heads), num_programs
    key = (*dtypes(q, pool[0]), sizes, rules.tensors_key, *alignments(q, *pool, sums, stats, out))
    _splits_kernel(grid, key, (*tensors, *numbers, sizes), group.decode_tile.launch_options)
