"""Latent attention (arXiv 2405.04434) on a GPU, in the absorbed or expanded form depending on the rows of a step.

In the absorbed form, queries and results are multiplied by the expansion, and attention reads latent vectors: little
memory traffic, many multiplications. In the expanded form, the latent vectors of a row are first expanded to keys and
values per head. This is faster if many tokens of a row are computed at once. The two forms round differently, so they
are not used with ``AttentionShape.batch_invariant``.

T tokens, R rows, H query heads, N plain and P rotated elements of a query head, V latent size, E = V + P key size,
O value size of a head, B pages of the pool, S page size, C positions of expanded rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from aioengine.attention._base import AttentionShape, DecodeBuffers, ForwardBatch
from aioengine.attention._gpu_rows import (
    PagedAttention,
    PagedStep,
    num_decode_rows,
    paged_rows,
    run_once,
    tiles_of,
    uploaded,
)
from aioengine.kernels import head_linear
from aioengine.kernels.arrays import Ints32
from aioengine.kernels.triton import attention, expanded_attention, latent_decode
from aioengine.kernels.triton.attention import PagedRows
from aioengine.kernels.triton.expanded_attention import ExpandedKV, ExpandedTiles
from aioengine.kernels.triton.latent_decode import Parts

TOKEN_PAIRS = 150
POSITION_PAIRS = 80
"""Cost of the matmuls with the expansion on an H200, per token in the absorbed form and per expanded position, in units
of the gain per (token, position) pair. With 16 heads, a pair takes 0.15 ns absorbed and 0.03 ns expanded.
"""
MAX_COPY_BYTES = 192 << 20
"""Limit of the latent vectors of expanded rows, which are copied from their pages."""
MAX_EXPANDED_BYTES = 128 << 20
"""Limit of the expanded keys and values in memory. One head is always expanded."""
ENOUGH_PROGRAMS = 256
"""Number of programs that keeps a GPU busy with rows of one token."""
MAX_PARTS = 64
MAX_PARTS_BYTES = 128 << 20
"""Limit of the results of parts before they are merged."""
LONG_ROW_PARTS = 8
"""Minimum number of parts of long rows."""


def plan_parts(shape: AttentionShape, num_rows: int, longest: int) -> Parts:
    """Return how ``num_rows`` rows of one token, with up to ``longest`` positions, are divided into parts."""
    num_tiles = -(-shape.num_heads // latent_decode.tile_for(num_rows, shape.num_heads).rows)
    few = min(max(ENOUGH_PROGRAMS // (num_rows * num_tiles), 1), MAX_PARTS)
    row_bytes = 4 * num_rows * shape.num_heads * shape.stored_value_size
    limit = max(MAX_PARTS_BYTES // row_bytes, 1)
    many = max(few, LONG_ROW_PARTS) if longest > latent_decode.LONG.value else few
    few, many = (1 << (min(count, limit).bit_length() - 1) for count in (few, many))
    return Parts(few, many)


def first_expanded(query_lengths: Ints32, kv_lengths: Ints32, page_size: int, max_positions: int) -> int:
    """Return the first expanded row. All rows after it are expanded too, because each form computes adjacent tokens.

    query_lengths, kv_lengths: [R]. max_positions: maximum number of expanded positions, in whole pages.
    """
    tokens, lengths = query_lengths[::-1].astype(np.int64), kv_lengths[::-1].astype(np.int64)
    positions = -(-lengths // page_size) * page_size
    pairs = tokens * lengths - tokens * (tokens - 1) // 2
    gains = (pairs + TOKEN_PAIRS * tokens - POSITION_PAIRS * positions).cumsum()
    gains[positions.cumsum() > max_positions] = 0
    best = int(gains.argmax())
    return len(tokens) - (best + 1 if gains[best] > 0 else 0)


@dataclass(frozen=True, slots=True)
class _LatentStep(PagedStep):
    """A prepared step: first rows of one token, then other rows in the absorbed form, then expanded rows.

    Attributes:
        num_decode: number of rows of one token. parts: how these rows are divided.
        num_absorbed: number of tokens in the absorbed form.
        absorbed_tiles: [X, 2] int32, tiles of the other absorbed rows, as for ``kernels.triton.attention.attend``.
        expanded_tiles: tiles of the expanded rows.
        first_page: start of the expanded rows in ``rows.page_ids``.
        heads_at_once: number of heads that are expanded at once.
    """

    num_decode: int
    parts: Parts
    num_absorbed: int
    absorbed_tiles: Tensor | None = None
    expanded_tiles: ExpandedTiles | None = None
    first_page: int = 0
    heads_at_once: int = 1

    def attend(self, q: Tensor, layer: int, *, out: Tensor) -> None:
        """Attend with q [T, H, N + P] to the pool of a layer into ``out`` [T, H, O]."""
        keys, expansion = self.layers.pool[layer][0], self.layers.shape.expansions[layer]
        count = self.num_absorbed
        if count:
            self._attend_absorbed(q[:count], keys, expansion, out=out[:count])
        if self.expanded_tiles is not None:
            self._attend_expanded(q, keys, expansion, self.expanded_tiles, out=out)

    def _attend_absorbed(self, q: Tensor, keys: Tensor, expansion: Tensor, *, out: Tensor) -> None:
        """Attend in the absorbed form: q [T, H, N + P], expansion [H, N + O, V] -> out [T, H, O]."""
        shape = self.layers.shape
        (num_tokens, num_heads, _), num_decode = q.shape, self.num_decode
        plain, rotated = q[..., : shape.plain_size], q[..., shape.plain_size :]
        attended = q.new_empty(num_tokens, num_heads, expansion.shape[2])
        absorbed = q.new_empty(num_tokens, num_heads, shape.head_size)
        latent, absorbed_rotated = absorbed.tensor_split((expansion.shape[2],), dim=2)
        head_linear.reference(plain, expansion[:, : shape.plain_size], latent)
        if self.absorbed_tiles is not None:
            absorbed_rotated.copy_(rotated)
            tensors = absorbed, (keys, keys[..., : latent.shape[2]]), self.rows, self.absorbed_tiles
            attention.attend(*tensors, scale=shape.scale, out=attended, in_splits=False)
        if num_decode:
            queries = latent[:num_decode], rotated[:num_decode]
            latent_decode.attend(queries, keys, self.rows, self.parts, scale=shape.scale, out=attended[:num_decode])
        head_linear.reference(attended, expansion[:, shape.plain_size :].transpose(1, 2), out)

    def _attend_expanded(
        self, q: Tensor, keys: Tensor, expansion: Tensor, tiles: ExpandedTiles, *, out: Tensor
    ) -> None:
        """Attend in the expanded form, some heads at a time: q [T, H, N + P] -> out [T, H, O]."""
        (num_heads, size, value_size), scale = expansion.shape, self.layers.shape.scale
        pages = keys.flatten(1).index_select(0, self.rows.page_ids[self.first_page :])
        latents, rotated = pages.view(-1, keys.shape[3]).tensor_split((value_size,), dim=1)
        for first in range(0, num_heads, self.heads_at_once):
            heads = slice(first, first + self.heads_at_once)
            expanded = torch.mm(latents, expansion[heads].flatten(0, 1).t()).view(len(latents), -1, size)
            kv = ExpandedKV(expanded, rotated, keys.shape[2], self.first_page)
            expanded_attention.attend(q[:, heads], kv, self.rows, tiles, scale=scale, out=out[:, heads])


class AdaptiveLatentAttention(PagedAttention):
    """Implements ``CapturableAttention`` for shapes with ``expansions``, in 16 bits."""

    def prepare(self, batch: ForwardBatch) -> None:
        layers, shape, page_size = self._layers, self._layers.shape, self._layers.page_size
        itemsize = layers.pool[0][0].itemsize
        kv_lengths = np.array(batch.kv_lengths, dtype=np.int32)
        query_lengths = np.array(batch.query_lengths, dtype=np.int32)
        rows, page_starts = paged_rows(batch, query_lengths, kv_lengths, page_size)
        num_decode = num_decode_rows(query_lengths)
        max_positions = MAX_COPY_BYTES // (shape.head_size * itemsize)
        expanded = max(first_expanded(query_lengths, kv_lengths, page_size, max_positions), num_decode)
        parts = plan_parts(shape, max(num_decode, 1), int(kv_lengths[: max(num_decode, 1)].max()))
        num_absorbed = int(query_lengths[:expanded].sum())
        step = _LatentStep(layers, batch.slot_mapping, rows, num_decode, parts, num_absorbed)
        if expanded > num_decode:
            absorbed_lengths = query_lengths[:expanded].copy()
            absorbed_lengths[:num_decode] = 0
            tokens_of_tile = attention.head_group(shape.num_heads, layers.pool[0]).tokens
            absorbed_tiles = uploaded(tiles_of(absorbed_lengths, tokens_of_tile), layers.device)
            step = replace(step, absorbed_tiles=absorbed_tiles)
        if expanded < len(query_lengths):
            first_page, last_page = int(page_starts[expanded]), int(page_starts[-1])
            head_bytes = (last_page - first_page) * page_size * shape.expansions[0].shape[1] * itemsize
            heads_at_once = min(max(MAX_EXPANDED_BYTES // head_bytes, 1), shape.num_heads)
            lengths = query_lengths.copy()
            lengths[:expanded] = 0
            tile = expanded_attention.tile_for(int(lengths.sum()), heads_at_once)
            starts = uploaded(tiles_of(lengths, tile.rows)[::-1].copy(), layers.device)  # slowest tiles first
            tiles = ExpandedTiles(starts, tile)
            step = replace(step, expanded_tiles=tiles, first_page=first_page, heads_at_once=heads_at_once)
        self._prepared = step

    def fixed_decode(self, num_rows: int, buffers: DecodeBuffers) -> PagedAttention:
        """Return attention for decode steps of ``num_rows`` rows."""
        layers = self._layers
        numbers = torch.arange(num_rows + 1, dtype=torch.int32, device=layers.device)
        rows = PagedRows(numbers, buffers.starts, buffers.last_lengths, buffers.page_ids)
        parts = plan_parts(layers.shape, num_rows, buffers.max_pages * layers.page_size)
        return PagedAttention(layers, _LatentStep(layers, buffers.slot_mapping, rows, num_rows, parts, num_rows))

    def warm_up(self) -> None:
        """Compile the kernels of all forms: rows of one token, and one row of few and of many tokens."""
        small, large = (tile.rows for tile in (expanded_attention.SMALL, expanded_attention.LARGE))
        enough = large * -(-expanded_attention.ENOUGH_PROGRAMS // self._layers.shape.num_heads)
        for num_rows, count in (*((1 << power, 1) for power in range(9)), (1, 2), (1, small), (1, enough)):
            run_once(self, self._layers, num_rows, count)
