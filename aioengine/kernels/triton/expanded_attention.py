"""Latent attention (arXiv 2405.04434) of rows with many tokens on a GPU, in its expanded form.

One matmul first expands the latent vectors to keys and values per head, packed in the order of rows and positions. A
key has N expanded elements and P rotated elements shared by all heads. Per head, query and position this needs
N + P + O multiplications, the absorbed form 2 V + P.

A program computes one head of a tile of tokens of one row. Blocks of positions are added to a running softmax from
first to last. The result depends on the tile and on the block, so it is not batch-invariant.

T tokens, C positions of all rows, H query heads, N plain and P rotated elements of a key, O value size, V latent size.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from aioengine.kernels.triton.attention import AttentionTile, PagedRows, load_part, tokens_of
from aioengine.kernels.triton.invariant_linear import loaded
from aioengine.kernels.triton.launcher import alignments, kernel, next_power_of_2
from aioengine.kernels.triton.scores import MASKED, nothing_attended

LARGE = AttentionTile(128, 64, 8, 3)
"""On an H200, a prompt of 4096 tokens with 16 heads takes 185 us: 47 % of the tensor cores' peak."""
SMALL = AttentionTile(64, 64, 4, 3)
"""For fewer tokens: 512 tokens after 3584 positions take 63 us, with large tiles 87."""
ENOUGH_PROGRAMS = 256
"""With fewer large tiles, small ones are faster."""
HOPPER_BYTES = 232_448
"""Shared memory per program."""


def tile_for(num_tokens: int, num_heads: int) -> AttentionTile:
    """Return the tile for rows with ``num_tokens`` tokens in total."""
    return LARGE if -(-num_tokens // LARGE.rows) * num_heads >= ENOUGH_PROGRAMS else SMALL


@kernel(
    do_not_specialize=["first_page"],  # the stride has two specializations: multiples of 16, and other values
    do_not_specialize_on_alignment=["query_starts", "page_starts", "last_lengths", "tiles"],
)
def _attend_kernel(
    q: tl.tensor, expanded: tl.tensor, rotated: tl.tensor, query_starts: tl.tensor, page_starts: tl.tensor,
    last_lengths: tl.tensor, tiles: tl.tensor, out: tl.tensor, scale: tl.tensor, first_page: tl.tensor,
    stride: tl.tensor,
    Q_TOKEN: tl.constexpr, Q_HEAD: tl.constexpr, OUT_TOKEN: tl.constexpr, ROTATED_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, KEY_SIZE: tl.constexpr, ROTATED_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    KEY_COLUMNS: tl.constexpr, MORE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Attend with one head of the tokens of one tile."""
    head = tl.program_id(0)
    tile_start, first_token, count, row_page, length = tokens_of(
        tiles, tl.program_id(1), query_starts, page_starts, last_lengths, PAGE_SIZE
    )
    key_start = (row_page - first_page).to(tl.int64) * PAGE_SIZE
    keys = expanded + key_start * stride + head * (KEY_SIZE + VALUE_SIZE)
    rotated += key_start * ROTATED_STRIDE
    token = tile_start + tl.arange(0, ROWS)
    is_there = token < count
    tokens = (first_token + token).to(tl.int64)
    own = q + (tokens * Q_TOKEN)[:, None] + head * Q_HEAD
    queries = load_part(own, is_there, KEY_SIZE, KEY_COLUMNS)
    turned = load_part(own + KEY_SIZE, is_there, ROTATED_SIZE, MORE)
    first_position = length - count + tile_start
    last = tl.minimum(first_position + tl.arange(0, ROWS), length - 1)
    stop, seen_by_all = tl.minimum(first_position + ROWS, length), (first_position + 1) // BLOCK * BLOCK
    highest, total, sums = nothing_attended(ROWS, COLUMNS)
    key_columns, more = tl.arange(0, KEY_COLUMNS)[None, :], tl.arange(0, MORE)[None, :]
    columns = tl.arange(0, COLUMNS)[None, :]
    for MASKS in tl.static_range(2):  # first the blocks that all tokens see, then the others
        for first in tl.range(seen_by_all if MASKS else 0, stop if MASKS else seen_by_all, BLOCK):
            positions = first + tl.arange(0, BLOCK)
            pointers = keys + (positions.to(tl.int64) * stride)[:, None]
            inside = (positions < stop)[:, None]
            is_key = inside & (key_columns < KEY_SIZE)
            key_part = loaded(pointers + key_columns, is_key, not MASKS and KEY_COLUMNS == KEY_SIZE)
            others = rotated + (positions.to(tl.int64) * ROTATED_STRIDE)[:, None] + more
            others = loaded(others, inside & (more < ROTATED_SIZE), not MASKS and MORE == ROTATED_SIZE)
            scores = tl.dot(turned, tl.trans(others), input_precision="ieee")
            scores = tl.dot(queries, tl.trans(key_part), scores, input_precision="ieee")
            if MASKS:
                scores = tl.where(positions[None, :] <= last[:, None], scores, MASKED)
            higher = tl.maximum(highest, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - higher[:, None])
            shrink = tl.exp2(highest - higher)
            highest, total = higher, total * shrink + tl.sum(weights, 1)
            values = pointers + KEY_SIZE + columns
            values = loaded(values, inside & (columns < VALUE_SIZE), not MASKS and COLUMNS == VALUE_SIZE)
            sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision="ieee")
    targets = out + (tokens * OUT_TOKEN)[:, None] + head * VALUE_SIZE + columns
    attended = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(targets, attended, mask=is_there[:, None] & (columns < VALUE_SIZE))


class ExpandedKV(NamedTuple):
    """Expanded keys and values of rows, for all positions of their pages.

    Attributes:
        heads: [C, H, N + O], keys and values of heads.
        rotated: [C, P], the rotated parts of keys.
        page_size: positions per page.
        first_page: index of the first page in ``PagedRows.page_ids``.
    """

    heads: Tensor
    rotated: Tensor
    page_size: int
    first_page: int


class ExpandedTiles(NamedTuple):
    """Tiles of one size. starts: [Y, 2] int32, (row, first token within the row) of each tile."""

    starts: Tensor
    tile: AttentionTile


def _num_stages(tile: AttentionTile, query_columns: int, columns: int, itemsize: int) -> int:
    """Return how many blocks of positions can be prefetched into shared memory."""
    free = _shared_bytes() - tile.rows * query_columns * itemsize
    return max(min(tile.num_stages, free // (tile.block * (query_columns + columns) * itemsize)), 1)


@cache
def _shared_bytes() -> int:
    """Return the shared memory per program in bytes; without a GPU, the value of Hopper."""
    if not torch.cuda.is_available():
        return HOPPER_BYTES
    return int(torch.cuda.get_device_properties().shared_memory_per_block_optin)


def attend(q: Tensor, kv: ExpandedKV, rows: PagedRows, tiles: ExpandedTiles, *, scale: float, out: Tensor) -> None:
    """Attend with q [T, H, N + P] to the expanded keys and values into ``out`` [T, H, O]."""
    expanded, rotated, page_size, first_page = kv
    starts, tile = tiles
    num_heads, size = q.shape[1:]
    rotated_size, value_size = rotated.shape[1], out.shape[2]
    key_size = size - rotated_size
    strides = *q.stride()[:2], out.stride(0), rotated.stride(0)
    widths = key_size, rotated_size, value_size
    columns_of = [max(next_power_of_2(width), 16) for width in widths]
    sizes = (*strides, page_size, *widths, *columns_of, tile.rows, tile.block)
    tensors = q, expanded, rotated, rows.query_starts, rows.page_starts, rows.last_lengths, starts, out
    stride = expanded.stride(0)
    key = q.dtype, sizes, tile, stride % 16 == 0, *alignments(q, expanded, rotated, out)
    num_stages = _num_stages(tile, sum(columns_of[:2]), columns_of[2], q.itemsize)
    options = {"num_warps": tile.num_warps, "num_stages": num_stages}
    numbers = scale / math.log(2), first_page, stride
    _attend_kernel((num_heads, len(starts), 1), key, (*tensors, *numbers, *sizes), options)
