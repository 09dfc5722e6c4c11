"""Attention with plain torch operations: the backend of a CPU that ``attention/fused.py`` does not serve, and the
reference for all others.

Every token's result is the same bits whatever it is computed with: alone or in any batch, as a decode step or inside
any prefill chunk. Keys are taken in chunks of ``CHUNK`` positions that are aligned from position 0. One chunk gives a
softmax and an output of its own as if it had the full ``CHUNK`` columns (those that a token may not see have weight
zero), and a token's chunks are put together in an order that chunks without weight do not change. The rows and columns
of a product are padded only as far as is needed for a row's result to depend on neither (``attention/_padding.py``,
``tests/compute/test_independence.py``).

Decode rows go together (``attention/_cpu.py``). Rows with more tokens go one by one, in blocks of tokens, since
their products are large.

Shape letters: T packed tokens, R rows, H query heads, K kv heads, G query heads of a kv head, E head size, U units,
C positions of a chunk, N pages of the pool, S page size, P pages of a chunk, M padded query rows of a kv head,
X chunks of the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aioengine.attention._chunks import (
    CHUNK,
    MASKED,
    ROWS,
    attend_only,
    attend_part,
    chunk_scores,
    combine,
    round_up,
)
from aioengine.attention._cpu import Paging, first_tokens
from aioengine.attention._padding import Padding, find_padding

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import AttentionShape, ForwardBatch
    from aioengine.attention._chunks import Part
    from aioengine.attention._cpu import DecodeRows, Units

BLOCK_SCORES = 1 << 19
"""Numbers that are worked on at a time: few enough to stay in the cache."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Some tokens of a prefill row. ``hidden``: chunk -> [tokens, C] to add to scores, where not all are visible.
    ``last_width``: C of the last chunk.
    """

    start: int
    stop: int
    num_chunks: int
    last_width: int
    hidden: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    """A row that computes several tokens. ``pages``: [X * K * P] indices into the pool's (page, kv head) pairs."""

    pages: Tensor
    blocks: list[_Block]


class TorchAttention:
    """See the module. ``kv_pool``: [L, 2, N, K, S, E], zeros at first; the page size divides ``CHUNK``."""

    def __init__(self, shape: AttentionShape, kv_pool: Tensor) -> None:
        num_layers, _, num_pages, num_kv_heads, page_size, head_size = kv_pool.shape
        self.page_size = page_size
        self._num_kv_heads = num_kv_heads
        self._group = shape.num_heads // num_kv_heads
        self._head_size = head_size
        self._scale = shape.scale
        self._is_causal = shape.is_causal
        padding = Padding(ROWS, CHUNK)
        if kv_pool.device.type == "cpu":
            padding = find_padding(head_size, kv_pool.dtype, torch.get_num_threads())
        self._padded_group = round_up(self._group, padding.rows)
        self._columns_step = max(padding.columns, page_size)
        self._paging = Paging(
            num_kv_heads=num_kv_heads,
            page_size=page_size,
            chunk=CHUNK,
            width_of=self._width_of,
            max_units=max(1, BLOCK_SCORES // (num_kv_heads * CHUNK * max(self._padded_group, head_size))),
        )
        by_page = kv_pool.view(num_layers, 2, num_pages * num_kv_heads, page_size * head_size)
        by_slot = kv_pool.view(num_layers, 2, num_pages * num_kv_heads * page_size, head_size)
        self._pages = [(by_page[layer, 0], by_page[layer, 1]) for layer in range(num_layers)]
        self._slots = [(by_slot[layer, 0], by_slot[layer, 1]) for layer in range(num_layers)]
        self._columns = torch.arange(CHUNK, device=kv_pool.device)
        self._new_slots = self._columns
        self._decode: DecodeRows | None = None
        self._prefill: list[_PrefillRow] = []

    def prepare(self, batch: ForwardBatch) -> None:
        self._new_slots = self._paging.new_slots(batch.slot_mapping)
        self._decode = self._paging.decode_rows(batch)
        starts = first_tokens(batch.query_lengths)
        self._prefill = [
            self._prefill_row(batch, row, starts[row]) for row, length in enumerate(batch.query_lengths) if length > 1
        ]

    def _width_of(self, visible: int) -> int:
        return min(CHUNK, round_up(visible, self._columns_step))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        for slots, new in zip(self._slots[layer], (k, v), strict=True):
            slots.index_copy_(0, self._new_slots, new.to(slots.dtype).reshape(-1, self._head_size))
        return self.attend(q, k, v, layer)

    def target(self, layer: int) -> None:
        """``forward`` writes: the pages are spread by an operation of torch."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        if self._decode and self._decode.tokens is None:
            return self._attend_decode(self._decode, q, layer).to(q.dtype)
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        if self._decode and self._decode.tokens is not None:
            attended = self._attend_decode(self._decode, q.index_select(0, self._decode.tokens), layer)
            out.index_copy_(0, self._decode.tokens, attended.to(q.dtype))
        for row in self._prefill:
            self._attend_prefill(row, q, layer, out)
        return out

    def _attend_decode(self, decode: DecodeRows, q: Tensor, layer: int) -> Tensor:
        """[R, H, E] -> [R, H * E]."""
        kv_heads, head_size, padded = self._num_kv_heads, self._head_size, self._padded_group
        queries = q.new_zeros(decode.num_rows, kv_heads, padded, head_size, dtype=torch.float32)
        grouped = q.view(decode.num_rows, kv_heads, self._group, head_size)
        torch.mul(grouped, self._scale, out=queries[:, :, : self._group])
        if decode.num_chunks == 1:
            outputs = [attend_only(*self._decode_scores(queries, units, layer)) for units in decode.units]
            merged = (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).view(queries.shape)
        else:
            merged = combine(self._decode_parts(decode, queries, layer))
        return merged[:, :, : self._group].reshape(decode.num_rows, -1)

    def _decode_parts(self, decode: DecodeRows, queries: Tensor, layer: int) -> Part:
        """[R, K, M, E] queries -> parts [X, R, K, M, ...], with no weight where a row has no such chunk."""
        sizes = queries.shape[1:3]
        num_places = decode.num_chunks * decode.num_rows
        whole = (
            queries.new_zeros(num_places, *sizes, self._head_size, dtype=self._pages[layer][1].dtype),
            queries.new_full((num_places, *sizes, 1), MASKED),
            queries.new_ones((num_places, *sizes, 1)),
        )
        for units in decode.units:
            parts = attend_part(*self._decode_scores(queries, units, layer))
            for target, part in zip(whole, parts, strict=True):
                if units.hidden is None:
                    by_unit = part.view(sizes[0], -1, sizes[1], part.shape[-1]).transpose(0, 1)
                else:
                    by_unit = part.view(-1, *sizes, part.shape[-1])
                target.index_copy_(0, units.places, by_unit)
        outputs, maxima, peaks = (part.view(decode.num_chunks, decode.num_rows, *part.shape[1:]) for part in whole)
        return outputs, maxima, peaks

    def _decode_scores(self, queries: Tensor, units: Units, layer: int) -> tuple[Tensor, Tensor]:
        """Scores [U * K, M, C] and values [U * K, C, E]; [K, U * M, C] and [K, C, E] where the chunk is shared."""
        keys, values = self._gather(layer, units.pages, units.width)
        num_units, head_size = units.rows.shape[0], self._head_size
        chosen = queries if queries.shape[0] == 1 else queries.index_select(0, units.rows)
        if units.hidden is None:
            chosen = chosen.transpose(0, 1).reshape(self._num_kv_heads, -1, head_size)
            return chunk_scores(chosen, keys, None, (1, 1)), values
        chosen = chosen.expand(num_units, -1, -1, -1).reshape(-1, queries.shape[2], head_size)
        return chunk_scores(chosen, keys, units.hidden, (num_units, -1)), values

    def _gather(self, layer: int, pairs: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Keys in fp32 and values, [chunks * K, C, E] each, where C is ``width``."""
        keys, values = self._pages[layer]
        shape = (-1, width, self._head_size)
        return keys.index_select(0, pairs).view(shape).float(), values.index_select(0, pairs).view(shape)

    def _prefill_row(self, batch: ForwardBatch, row: int, start: int) -> _PrefillRow:
        count, kv_length = batch.query_lengths[row], batch.kv_lengths[row]
        table = self._paging.chunk_table(batch.page_table[row : row + 1], -(-kv_length // CHUNK))
        heads = self._group * self._num_kv_heads
        step = max(ROWS, BLOCK_SCORES // (heads * CHUNK) // ROWS * ROWS)
        first = kv_length - count
        blocks = []
        for offset in range(0, count, step):
            size = min(step, count - offset)
            position = first + offset
            visible = position + size if self._is_causal else kv_length
            num_chunks = -(-visible // CHUNK)
            last_width = self._width_of(visible - (num_chunks - 1) * CHUNK)
            last = torch.arange(position, position + round_up(size, ROWS), device=self._columns.device)
            if not self._is_causal:
                last = torch.full_like(last, kv_length - 1)
            first_hidden = (position if self._is_causal else kv_length - 1) // CHUNK
            hidden = {
                chunk: (self._columns > (last - chunk * CHUNK).unsqueeze(1)) * MASKED
                for chunk in range(first_hidden, num_chunks)
            }
            hidden[num_chunks - 1] = hidden[num_chunks - 1][:, :last_width]
            blocks.append(_Block(start + offset, start + offset + size, num_chunks, last_width, hidden))
        return _PrefillRow(pages=self._paging.pairs(table[0]), blocks=blocks)

    def _attend_prefill(self, row: _PrefillRow, q: Tensor, layer: int, out: Tensor) -> None:
        kv_heads, group, head_size = self._num_kv_heads, self._group, self._head_size
        keys, values = (part.view(-1, kv_heads, CHUNK, head_size) for part in self._gather(layer, row.pages, CHUNK))
        for block in row.blocks:
            size = block.stop - block.start
            padded = round_up(size, ROWS)
            queries = q.new_zeros(kv_heads, group, padded, head_size, dtype=torch.float32)
            grouped = q[block.start : block.stop].view(size, kv_heads, group, head_size).permute(1, 2, 0, 3)
            torch.mul(grouped, self._scale, out=queries[:, :, :size])
            merged = self._attend_block(queries.view(kv_heads, group * padded, head_size), keys, values, block)
            merged = merged.view(kv_heads, group, padded, head_size)[:, :, :size]
            out[block.start : block.stop].view(size, kv_heads, group, head_size).copy_(merged.permute(2, 0, 1, 3))

    def _attend_block(self, queries: Tensor, keys: Tensor, values: Tensor, block: _Block) -> Tensor:
        """[K, G * M, E] queries over keys and values [X, K, C, E] -> [K, G * M, E]."""
        groups = (self._num_kv_heads * self._group, -1)
        if block.num_chunks == 1:
            width = block.last_width
            return attend_only(chunk_scores(queries, keys[0, :, :width], block.hidden[0], groups), values[0, :, :width])
        widths = [*[CHUNK] * (block.num_chunks - 1), block.last_width]
        parts = [
            attend_part(
                chunk_scores(queries, keys[chunk, :, :width], block.hidden.get(chunk), groups),
                values[chunk, :, :width],
            )
            for chunk, width in enumerate(widths)
        ]
        outputs, maxima, peaks = (torch.stack(part) for part in zip(*parts, strict=True))
        return combine((outputs, maxima, peaks))


PLUGIN = TorchAttention
