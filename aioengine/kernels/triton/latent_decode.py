"""Latent attention (arXiv 2405.04434) of rows of one token, in its absorbed form, on a GPU.

Faster than the batch-invariant ``kernels/triton/attention.py``: a tile has the heads of one token, and if there
are few rows, the positions of a row are divided among more programs. A program computes some heads over one part of the
positions (``_parts_kernel``). A second kernel merges the parts of a row. The result of a row with one part is written
directly. Blocks of positions are added to a running softmax from first to last. The parts depend on the other rows, so
the bits do too.

R rows, H query heads, V latent size, P rotated elements, E = V + P key size, N pages of the pool, S page size, X parts
of a row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.triton.attention import AttentionTile, PagedRows, load_part, pages_of
from aioengine.kernels.triton.launcher import alignments, kernel, next_power_of_2
from aioengine.kernels.triton.scores import MASKED, nothing_attended, softmax_step, store_attended, store_split

Queries = tuple[Tensor, Tensor]

NARROW = AttentionTile(16, 32, 4, 3)
"""On an H200, 16 heads over 1024 positions take 8 us with one row, 21 us with 32 and 94 us with 256."""
BROAD = AttentionTile(64, 64, 8, 2)
"""For many heads and rows. 64 rows are the minimum for Hopper's tensor cores."""
NARROW_HEADS, NARROW_ROWS = 32, 2
"""Up to one of these numbers, ``NARROW`` is faster."""
LONG = tl.constexpr(2048)
"""Positions. Longer parts are divided further, even if the GPU is busy: a long row among short rows would finish much
later than they do.
"""
MERGED_ELEMENTS = 8192
"""Elements of parts that one program merges."""


class Parts(NamedTuple):
    """How rows are divided: into up to ``few`` parts; if these are longer than ``LONG``, into up to ``many`` parts (a
    power of 2).
    """

    few: int
    many: int


def tile_for(num_rows: int, num_heads: int) -> AttentionTile:
    """Return the tile for R rows of H heads."""
    return NARROW if num_heads <= NARROW_HEADS or num_rows <= NARROW_ROWS else BROAD


@triton.jit
def part_size(length: tl.tensor, few_parts: tl.tensor, many_parts: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return the number of positions per part of a row. The last part may be shorter."""
    return tl.minimum(
        tl.cdiv(tl.cdiv(length, few_parts), BLOCK) * BLOCK,
        tl.maximum(tl.cdiv(tl.cdiv(length, many_parts), BLOCK) * BLOCK, LONG),
    )


@kernel(
    do_not_specialize=["few_parts", "many_parts"],
    do_not_specialize_on_alignment=["page_starts", "last_lengths", "page_ids"],
)
def _parts_kernel(
    latent: tl.tensor, rotated: tl.tensor, keys: tl.tensor, page_starts: tl.tensor, last_lengths: tl.tensor,
    page_ids: tl.tensor, part_sums: tl.tensor, part_stats: tl.tensor, out: tl.tensor, scale: tl.tensor,
    few_parts: tl.tensor, many_parts: tl.tensor,
    LATENT_ROW: tl.constexpr, LATENT_HEAD: tl.constexpr, ROTATED_ROW: tl.constexpr, ROTATED_HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr, MORE: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Attend with some heads of a row to one part of its positions."""
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first_page, length = pages_of(row, page_starts, last_lengths, PAGE_SIZE)
    size = part_size(length, few_parts, many_parts, BLOCK)
    start = part * size
    if start >= length:
        return
    stop = tl.minimum(start + size, length)
    page_ids += first_page
    following = start + tl.arange(0, BLOCK)
    pages = tl.load(page_ids + following // PAGE_SIZE, mask=following < stop, other=0)
    heads = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    is_head = heads < NUM_HEADS
    pointers = latent + row * LATENT_ROW + heads * LATENT_HEAD
    queries = load_part(pointers[:, None], is_head, VALUE_SIZE, COLUMNS)
    pointers = rotated + row * ROTATED_ROW + heads * ROTATED_HEAD
    turned = load_part(pointers[:, None], is_head, KEY_SIZE - VALUE_SIZE, MORE)
    columns, more = tl.arange(0, COLUMNS)[None, :], tl.arange(0, MORE)[None, :]
    highest, total, sums = nothing_attended(HEADS, COLUMNS)
    for first in tl.range(start, stop, BLOCK):
        positions = first + tl.arange(0, BLOCK)
        inside = (positions < stop)[:, None]
        sources = keys + ((pages.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE) * KEY_SIZE)[:, None]
        values = tl.load(sources + columns, mask=inside & (columns < VALUE_SIZE), other=0.0)
        others = tl.load(sources + VALUE_SIZE + more, mask=inside & (more < KEY_SIZE - VALUE_SIZE), other=0.0)
        # the page ids of the next block are loaded together with the keys of this block, which never wait for them
        following = positions + BLOCK
        pages = tl.load(page_ids + following // PAGE_SIZE, mask=following < stop, other=0)
        scores = tl.dot(turned, tl.trans(others), input_precision="ieee")
        scores = tl.dot(queries, tl.trans(values), scores, input_precision="ieee") * scale
        scores = tl.where((positions < stop)[None, :], scores, MASKED)
        weights, shrink, highest, total = softmax_step(scores, highest, total)
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision="ieee")
    if size >= length:
        store_attended(out, row * NUM_HEADS + heads, is_head, (highest, total, sums), None, heads, None, VALUE_SIZE)
    else:
        targets = (row * many_parts + part) * NUM_HEADS + heads
        store_split(part_sums, part_stats, targets, (highest, total, sums), is_head, VALUE_SIZE)


@kernel(do_not_specialize=["few_parts", "many_parts"], do_not_specialize_on_alignment=["page_starts", "last_lengths"])
def _merge_kernel(
    part_sums: tl.tensor, part_stats: tl.tensor, page_starts: tl.tensor, last_lengths: tl.tensor, out: tl.tensor,
    few_parts: tl.tensor, many_parts: tl.tensor,
    NUM_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, PARTS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Merge the parts of a row, for some columns of one head."""
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    _, length = pages_of(row, page_starts, last_lengths, PAGE_SIZE)
    size = part_size(length, few_parts, many_parts, BLOCK)
    if size >= length:
        return
    parts = tl.arange(0, PARTS)
    is_part = parts * size < length
    sources = (row * many_parts + parts) * NUM_HEADS + head
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < VALUE_SIZE
    pointers = part_sums + (sources * VALUE_SIZE)[:, None] + columns[None, :]
    sums = tl.load(pointers, mask=is_part[:, None] & is_column[None, :], other=0.0)
    highest = tl.load(part_stats + 2 * sources, mask=is_part, other=MASKED)
    total = tl.load(part_stats + 2 * sources + 1, mask=is_part, other=0.0)
    weights = tl.exp2(highest - tl.max(highest, 0))
    merged = tl.sum(sums * weights[:, None], 0) / tl.sum(total * weights, 0)
    tl.store(out + (row * NUM_HEADS + head) * VALUE_SIZE + columns, merged.to(out.dtype.element_ty), mask=is_column)


def attend(queries: Queries, keys: Tensor, rows: PagedRows, parts: Parts, *, scale: float, out: Tensor) -> None:
    """Attend with queries [R, H, V] and rotated [R, H, P] of R rows to keys [N, 1, S, E] into ``out`` [R, H, V].

    ``out`` is contiguous, and the last dimension of the queries.
    """
    latent, rotated = queries
    num_rows, num_heads, value_size = latent.shape
    page_size, key_size = keys.shape[2:]
    tile = tile_for(num_rows, num_heads)
    columns, more = (max(next_power_of_2(size), 16) for size in (value_size, key_size - value_size))
    num_merged = 0 if parts.many == 1 else num_rows
    sums = torch.empty(num_merged, parts.many, num_heads, value_size, dtype=torch.float32, device=latent.device)
    stats = torch.empty(num_merged, parts.many, num_heads, 2, dtype=torch.float32, device=latent.device)
    tensors = latent, rotated, keys, rows.page_starts, rows.last_lengths, rows.page_ids, sums, stats, out
    strides = *latent.stride()[:2], *rotated.stride()[:2]
    sizes = (*strides, num_heads, page_size, key_size, value_size, columns, more, tile.rows, tile.block)
    key = latent.dtype, sizes, tile, *alignments(latent, rotated, keys, sums, stats, out)
    grid = -(-num_heads // tile.rows), num_rows, parts.many
    _parts_kernel(grid, key, (*tensors, scale / math.log(2), *parts, *sizes), tile.options)
    if not num_merged:
        return
    merged = max(min(MERGED_ELEMENTS // parts.many, columns), 32)
    sizes = num_heads, page_size, value_size, parts.many, merged, tile.block
    key = out.dtype, sizes, *alignments(sums, stats, out)
    tensors = sums, stats, rows.page_starts, rows.last_lengths, out
    _merge_kernel((-(-value_size // merged), num_heads, num_rows), key, (*tensors, *parts, *sizes), {"num_warps": 4})
