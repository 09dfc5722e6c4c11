"""Attention with plain torch operations: the backend of the CPU, and the reference for all others.

Every token's result is the same bits whatever it is computed with: alone or in any batch, as a decode step or inside
any prefill chunk. Keys are taken in chunks of ``CHUNK`` positions that are aligned from position 0. One chunk gives a
softmax and an output of its own, always with the full ``CHUNK`` columns (those that a token may not see have weight
zero), and a token's chunks are put together in an order that chunks without weight do not change. The number of
columns of every product is fixed, its rows are padded to multiples of ``ROWS``, from where on a row's result depends
no more on the number of rows (``tests/compute/test_independence.py``).

Decode rows go together: a *unit* is one chunk of one row, and all units are one batched product. Rows with more
tokens go one by one, in blocks of tokens, since their products are large.

Shape letters: T packed tokens, R rows, H query heads, K kv heads, G query heads of a kv head, E head size, U units,
C positions of a chunk, N pages of the pool, S page size, P pages of a chunk, M padded query rows of a kv head,
X chunks of the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import AttentionShape, ForwardBatch

CHUNK = 256
ROWS = 16
MASKED = -1.0e30
BLOCK_SCORES = 1 << 19
"""Scores that are worked on at a time: few enough to stay in the cache."""


@dataclass(frozen=True, slots=True)
class _DecodeRows:
    """The rows of the batch that compute one token, as units ordered by chunk, then by row.

    tokens: [R] indices into T, or None where these are all tokens of the batch.
    rows: [U] row of the unit, counted among these rows.
    places: [U] chunk * R + row.
    pages: [U, K * P] indices into the pool's (page, kv head) pairs.
    hidden: [U, 1, C] True for positions that the token may not see.
    """

    num_rows: int
    num_chunks: int
    tokens: Tensor | None
    rows: Tensor
    places: Tensor
    pages: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class _Block:
    """Some tokens of a prefill row. ``hidden``: chunk -> [1, tokens, C] mask, for chunks that reach beyond a token."""

    start: int
    stop: int
    num_chunks: int
    hidden: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    """A row that computes several tokens. ``pages``: [X * K * P] indices into the pool's (page, kv head) pairs."""

    pages: Tensor
    blocks: list[_Block]


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def combine(outputs: Tensor, maxima: Tensor, peaks: Tensor) -> Tensor:
    """Put chunks together: outputs [X, ..., E], row maxima and highest probabilities [X, ..., 1] -> fp32 [..., E].

    A chunk's sum of exponentials is the inverse of its highest probability. The sums over chunks go by halves, so that
    zeros after the last chunk change no bit.
    """
    if outputs.shape[0] == 1:
        return outputs[0].float()
    weights = torch.exp(maxima - maxima.amax(0)).div_(peaks)
    weights = weights.div_(_sum_by_halves(weights.clone()))
    return _sum_by_halves(weights * outputs)


def _sum_by_halves(terms: Tensor) -> Tensor:
    """Sum over the first axis, in place."""
    count = terms.shape[0]
    while count > 1:
        half = 1 << (count - 1).bit_length() - 1
        terms[: count - half] += terms[half:count]
        count = half
    return terms[0]


class TorchAttention:
    """See the module. ``kv_pool``: [L, 2, N, K, S, E], zeros at first; page size a power of two, at most ``CHUNK``."""

    def __init__(self, shape: AttentionShape, kv_pool: Tensor) -> None:
        num_layers, _, num_pages, num_kv_heads, page_size, head_size = kv_pool.shape
        if CHUNK % page_size:
            message = f"page_size {page_size} does not divide {CHUNK}, as this attention backend needs"
            raise ValueError(message)
        self._num_kv_heads = num_kv_heads
        self._group = shape.num_heads // num_kv_heads
        self._head_size = head_size
        self._scale = shape.scale
        self.page_size = page_size
        self._chunk_pages = CHUNK // page_size
        by_page = kv_pool.view(num_layers, 2, num_pages * num_kv_heads, page_size * head_size)
        by_slot = kv_pool.view(num_layers, 2, num_pages * num_kv_heads * page_size, head_size)
        self._pages = [(by_page[layer, 0], by_page[layer, 1]) for layer in range(num_layers)]
        self._slots = [(by_slot[layer, 0], by_slot[layer, 1]) for layer in range(num_layers)]
        self._kv_heads = torch.arange(num_kv_heads, device=kv_pool.device)
        self._columns = torch.arange(CHUNK, device=kv_pool.device)
        self._new_slots = self._kv_heads
        self._decode: _DecodeRows | None = None
        self._prefill: list[_PrefillRow] = []

    def prepare(self, batch: ForwardBatch) -> None:
        pages, offsets = batch.slot_mapping // self.page_size, batch.slot_mapping % self.page_size
        heads = (pages * self._num_kv_heads).unsqueeze(1) + self._kv_heads
        self._new_slots = (heads * self.page_size + offsets.unsqueeze(1)).flatten()
        single = [row for row, length in enumerate(batch.query_lengths) if length == 1]
        starts = [0]
        for length in batch.query_lengths:
            starts.append(starts[-1] + length)
        self._decode = self._decode_rows(batch, single, starts) if single else None
        self._prefill = [
            self._prefill_row(batch, row, starts[row]) for row, length in enumerate(batch.query_lengths) if length > 1
        ]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        for slots, new in zip(self._slots[layer], (k, v), strict=True):
            slots.index_copy_(0, self._new_slots, new.to(slots.dtype).reshape(-1, self._head_size))
        if self._decode and self._decode.tokens is None:
            return self._attend_decode(self._decode, q, layer).to(v.dtype)
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=v.dtype, device=q.device)
        if self._decode and self._decode.tokens is not None:
            attended = self._attend_decode(self._decode, q.index_select(0, self._decode.tokens), layer)
            out.index_copy_(0, self._decode.tokens, attended.to(v.dtype))
        for row in self._prefill:
            self._attend_prefill(row, q, layer, out)
        return out

    def _chunk_table(self, page_table: Tensor, num_chunks: int) -> Tensor:
        """[R, pages] -> [R, X, K * P]: (page, kv head) pairs of each chunk, padded with page 0."""
        num_rows, given = page_table.shape
        table = page_table.new_zeros(num_rows, num_chunks * self._chunk_pages, dtype=torch.int64)
        used = min(given, table.shape[1])
        table[:, :used] = page_table[:, :used]
        pairs = table.view(num_rows, num_chunks, 1, self._chunk_pages) * self._num_kv_heads
        return (pairs + self._kv_heads.unsqueeze(1)).flatten(2)

    def _decode_rows(self, batch: ForwardBatch, single: list[int], starts: list[int]) -> _DecodeRows:
        everything = len(single) == len(batch.query_lengths)
        device = batch.page_table.device
        lengths = torch.tensor([batch.kv_lengths[row] for row in single], device=device)
        num_chunks = -(-int(lengths.max()) // CHUNK)
        page_table = batch.page_table if everything else batch.page_table[torch.tensor(single, device=device)]
        left = lengths - torch.arange(num_chunks, device=device).unsqueeze(1) * CHUNK
        chunks, rows = torch.nonzero(left > 0, as_tuple=True)
        return _DecodeRows(
            num_rows=len(single),
            num_chunks=num_chunks,
            tokens=None if everything else torch.tensor([starts[row] for row in single], device=device),
            rows=rows,
            places=chunks * len(single) + rows,
            pages=self._chunk_table(page_table, num_chunks)[rows, chunks],
            hidden=(self._columns >= left[chunks, rows].unsqueeze(1)).unsqueeze(1),
        )

    def _attend_decode(self, decode: _DecodeRows, q: Tensor, layer: int) -> Tensor:
        """[R, H, E] -> [R, H * E]."""
        kv_heads, head_size, padded = self._num_kv_heads, self._head_size, _round_up(self._group, ROWS)
        queries = q.new_zeros(decode.num_rows, kv_heads, padded, head_size, dtype=torch.float32)
        grouped = q.view(decode.num_rows, kv_heads, self._group, head_size)
        torch.mul(grouped, self._scale, out=queries[:, :, : self._group])
        num_units = decode.rows.shape[0]
        step = max(1, BLOCK_SCORES // (kv_heads * CHUNK * max(padded, head_size)))
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for start in range(0, num_units, step):
            units = slice(start, start + step)
            chosen = queries.index_select(0, decode.rows[units]) if num_units > 1 else queries
            keys, values = self._gather(layer, decode.pages[units].flatten())
            parts.append(self._attend(chosen.view(-1, padded, head_size), keys, values, decode.hidden[units]))
        outputs, maxima, peaks = (torch.cat(part) if len(parts) > 1 else part[0] for part in zip(*parts, strict=True))
        merged = self._merge_units(decode, outputs, maxima, peaks)
        return merged.view(decode.num_rows, kv_heads, padded, head_size)[:, :, : self._group].reshape(
            decode.num_rows, -1
        )

    def _merge_units(self, decode: _DecodeRows, outputs: Tensor, maxima: Tensor, peaks: Tensor) -> Tensor:
        """[U * K, M, ...] -> [R, K, M, E]."""
        if decode.num_chunks == 1:
            return outputs
        full = decode.num_chunks * decode.num_rows
        placed = []
        for part, filler in ((outputs, 0.0), (maxima, MASKED), (peaks, 1.0)):
            by_unit = part.view(-1, self._num_kv_heads, *part.shape[1:])
            if by_unit.shape[0] < full:
                target = by_unit.new_full((full, *by_unit.shape[1:]), filler)
                by_unit = target.index_copy_(0, decode.places, by_unit)
            placed.append(by_unit.view(decode.num_chunks, decode.num_rows, *by_unit.shape[1:]))
        return combine(*placed)

    def _gather(self, layer: int, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Keys in fp32 and values of whole chunks, [units * K, C, E] each."""
        keys, values = self._pages[layer]
        shape = (-1, CHUNK, self._head_size)
        return keys.index_select(0, pairs).view(shape).float(), values.index_select(0, pairs).view(shape)

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[B, M, E] scaled fp32 queries over one chunk each: outputs, score maxima and highest probabilities.

        ``hidden`` is a mask that broadcasts to the scores [B / K, K * M or tokens, C].
        """
        scores = torch.bmm(queries, keys.transpose(1, 2))
        if hidden is not None:
            scores.view(-1, self._num_kv_heads * queries.shape[1], CHUNK).masked_fill_(hidden, MASKED)
        maxima = scores.amax(-1, keepdim=True)
        probabilities = torch.softmax(scores, -1)
        peaks = probabilities.amax(-1, keepdim=True)
        return torch.bmm(probabilities.to(values.dtype), values), maxima, peaks

    def _prefill_row(self, batch: ForwardBatch, row: int, start: int) -> _PrefillRow:
        count, kv_length = batch.query_lengths[row], batch.kv_lengths[row]
        pairs = self._chunk_table(batch.page_table[row : row + 1], -(-kv_length // CHUNK))
        heads = self._group * self._num_kv_heads
        step = max(ROWS, BLOCK_SCORES // (heads * CHUNK) // ROWS * ROWS)
        first = kv_length - count
        blocks = []
        for offset in range(0, count, step):
            size = min(step, count - offset)
            position = first + offset
            num_chunks = -(-(position + size) // CHUNK)
            hidden = {
                chunk: self._hidden(position, _round_up(size, ROWS), chunk)
                for chunk in range(position // CHUNK, num_chunks)
            }
            blocks.append(_Block(start + offset, start + offset + size, num_chunks, hidden))
        return _PrefillRow(pages=pairs.flatten(), blocks=blocks)

    def _hidden(self, position: int, size: int, chunk: int) -> Tensor:
        visible = torch.arange(position, position + size, device=self._columns.device) - chunk * CHUNK
        return self._columns > visible.unsqueeze(1)

    def _attend_prefill(self, row: _PrefillRow, q: Tensor, layer: int, out: Tensor) -> None:
        kv_heads, group, head_size = self._num_kv_heads, self._group, self._head_size
        keys, values = self._gather(layer, row.pages)
        keys = keys.view(-1, kv_heads, CHUNK, head_size)
        values = values.view(-1, kv_heads, CHUNK, head_size)
        for block in row.blocks:
            size = block.stop - block.start
            padded = _round_up(size, ROWS)
            queries = q.new_zeros(kv_heads, group, padded, head_size, dtype=torch.float32)
            grouped = q[block.start : block.stop].view(size, kv_heads, group, head_size).permute(1, 2, 0, 3)
            torch.mul(grouped, self._scale, out=queries[:, :, :size])
            queries = queries.view(kv_heads, group * padded, head_size)
            parts = [
                self._attend_block(queries, keys[chunk], values[chunk], block.hidden.get(chunk))
                for chunk in range(block.num_chunks)
            ]
            outputs, maxima, peaks = (torch.stack(part) for part in zip(*parts, strict=True))
            merged = combine(outputs, maxima, peaks).view(kv_heads, group, padded, head_size)[:, :, :size]
            out[block.start : block.stop].view(size, kv_heads, group, head_size).copy_(merged.permute(2, 0, 1, 3))

    def _attend_block(
        self, queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores = torch.bmm(queries, keys.transpose(1, 2))
        if hidden is not None:
            scores.view(-1, hidden.shape[0], CHUNK).masked_fill_(hidden, MASKED)
        maxima = scores.amax(-1, keepdim=True)
        probabilities = torch.softmax(scores, -1)
        peaks = probabilities.amax(-1, keepdim=True)
        return torch.bmm(probabilities.to(values.dtype), values), maxima, peaks


PLUGIN = TorchAttention
