"""Attention with torch's fused kernel for the CPU, where it gives a row the same bits in any company.

As in ``attention/torch.py``, every token's result is the same bits alone or in any batch, as a decode step or inside
any prefill chunk. Keys are taken in chunks of ``CHUNK`` positions that are aligned from position 0; the kernel gives
the output of a chunk and the logarithm of its sum of exponentials, and a token's chunks are put together in an order
that chunks without weight do not change. With which numbers of query rows and of positions the kernel gives a row the
bits of a whole chunk is found out by trying (``find_limits``); where there are none, ``attention/torch.py`` computes.

Shape letters: T packed tokens, R rows, H query heads, K kv heads, G query heads of a kv head, E head size, U units,
C positions of a chunk, N pages of the pool, S page size, P pages of a chunk, M padded query rows of a kv head,
X chunks of the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from aioengine.attention._cpu import BLOCK_TOKENS, CHUNK, MASKED, Paging, first_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import AttentionShape, ForwardBatch, WriteKV
    from aioengine.attention._cpu import DecodeRows, Units

UNIT_BYTES = 8 << 20
"""Keys and values that are worked on at a time: few enough to stay near the caches."""
TRIED_ROWS = (4, 8, 16)
TRIED_TIMES = (1, 2, 3, 5, 9, 12)
TRIED_WIDTHS = tuple(range(64, CHUNK, 64))
MOST_ROWS = 200
"""Above 192 rows, and below it, the kernel takes blocks of other sizes."""
TRIED_OFFSETS = (0, 16, 37)
"""Where a row is among many: without AVX-512, its bits depend on that."""

Sums = tuple["Tensor", "Tensor"]
"""Of one chunk: outputs [..., M, E] and logarithms of the sums of exponentials [..., M]."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``rows``: query rows come in multiples of this. ``widths``: numbers of positions that a chunk may be cut to."""

    rows: int
    widths: tuple[int, ...]


def serves(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this backend can compute there; the kernel has no soft cap, and no values of another size."""
    if shape.soft_cap is not None or shape.value_size is not None:
        return False
    if device.type != "cpu" or not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return False
    return find_limits(shape.head_size, dtype, torch.get_num_threads()) is not None


@lru_cache(maxsize=64)
def find_limits(head_size: int, dtype: torch.dtype, num_threads: int) -> Limits | None:
    """Those with which a row is seen to be the same bits as among many rows over a whole chunk, or None.

    ``num_threads`` only tells apart what was tried with other numbers of threads.
    """
    rows = next((rows for rows in TRIED_ROWS if _agree(rows, CHUNK, head_size, dtype)), None)
    if rows is None:
        return None
    return Limits(rows, (*(width for width in TRIED_WIDTHS if _agree(rows, width, head_size, dtype)), CHUNK))


def _agree(rows: int, width: int, head_size: int, dtype: torch.dtype) -> bool:
    """Whether queries in multiples of ``rows`` over ``width`` positions give what many give over a whole chunk.

    The second half of the positions takes back what the first adds to the output: what is left is the rounding, so
    that a sum in another order shows. With the large scale a row sees one key alone, and its score shows.
    """
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 2, MOST_ROWS, head_size, generator=generator).to(dtype)
    keys, values = torch.randn(2, 2, 2, CHUNK, head_size, generator=generator).to(dtype)
    half = width // 2
    keys[:, :, half:width] = keys[:, :, :half]
    values[:, :, half:width] = -values[:, :, :half]
    hidden = ((torch.arange(CHUNK) >= width) * MASKED).view(1, 1, 1, -1)
    for scale in (0.05, 4.0):
        expected = _attend(queries, keys, values, hidden=hidden, scale=scale)
        for times, (batch, heads), offset in product(TRIED_TIMES, ((1, 1), (1, 2), (2, 2)), TRIED_OFFSETS):
            inside = slice(offset, offset + rows * times)
            few = queries[:batch, :heads, inside].contiguous()
            cut_keys, cut_values = keys[:batch, :heads, :width], values[:batch, :heads, :width]
            found = _attend(few, cut_keys, cut_values, hidden=hidden[..., :width], scale=scale)
            for part, whole in zip(found, expected, strict=True):
                if not torch.equal(part, whole[:batch, :heads, inside]):
                    return False
    return True


def _attend(queries: Tensor, keys: Tensor, values: Tensor, *, hidden: Tensor | None, scale: float) -> Sums:
    """[B, H, M, E] queries over [B, H, C, E] keys and values; ``hidden`` [1 or B, 1, 1 or M, C] is added to scores."""
    if hidden is None:
        hidden = torch.zeros(1, 1, 1, 1)
    mask = hidden.expand(queries.shape[0], 1, queries.shape[2], keys.shape[2])
    sums: Sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        queries, keys, values, 0.0, False, attn_mask=mask, scale=scale
    )
    return sums


def _combine(outputs: Tensor, sums: Tensor) -> Tensor:
    """Outputs of chunks [X, ..., E] and logarithms of their sums of exponentials [X, ...] -> fp32 [..., E]."""
    weights = torch.exp(sums - sums.amax(0))
    weights = weights.div_(_sum_by_halves(weights.clone()))
    return _sum_by_halves(weights.unsqueeze(-1) * outputs)


def _sum_by_halves(terms: Tensor) -> Tensor:
    """[X, ...] -> [...], the sum over the first axis, in place. Zeros at its end change no bit of the sum."""
    count = terms.shape[0]
    while count > 1:
        half = 1 << (count - 1).bit_length() - 1
        terms[: count - half] += terms[half:count]
        count = half
    return terms[0]


def _by_slot(parts: dict[int, Sums]) -> Sums:
    """Sums [...] of slots -> [X, ...] of all slots up to the last; one that is not there has no weight."""
    outputs, sums = next(iter(parts.values()))
    nothing = torch.zeros_like(outputs), torch.full_like(sums, MASKED)
    outputs, sums = zip(*(parts.get(slot, nothing) for slot in range(max(parts) + 1)), strict=True)
    return torch.stack(outputs), torch.stack(sums)


def _with_sinks(outputs: Tensor, sums: Tensor, sinks: Tensor) -> Sums:
    """Outputs [X, ..., E] and sums [X, ...] of chunks with those of learned sinks before them; sinks: as sums[0]."""
    of_sinks = torch.broadcast_to(sinks, sums.shape[1:]).unsqueeze(0)
    return torch.cat((torch.zeros_like(outputs[:1]), outputs)), torch.cat((of_sinks, sums))


@dataclass(frozen=True, slots=True)
class _Block:
    """Some tokens of a prefill row. ``chunks``: those that they see."""

    start: int
    stop: int
    chunks: list[_Chunk]


class _Chunk(NamedTuple):
    """A chunk that a block sees: its number among those of the row that are gathered, its slot, its width C, and what
    hides some of it [M, C], if anything does.
    """

    number: int
    slot: int
    width: int
    hidden: Tensor | None


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    """A row that computes several tokens. ``pages``: [2 * X * K * P] as in ``_both``."""

    pages: Tensor
    blocks: list[_Block]


class FusedAttention:
    """See the module. ``kv_pool``: [L, 2, N, K, S, E], zeros at first; the page size divides ``CHUNK``."""

    def __init__(self, shape: AttentionShape, kv_pool: Tensor) -> None:
        """kv_pool: [L, 2, N, K, S, E].

        Raises:
            ValueError: the kernel's results depend on the batch here, or the page size does not divide ``CHUNK``.
        """
        num_layers, _, num_pages, num_kv_heads, page_size, head_size = kv_pool.shape
        limits = find_limits(head_size, kv_pool.dtype, torch.get_num_threads())
        if limits is None:
            message = f"torch's fused attention gives heads of {head_size} other bits in other batches here"
            raise ValueError(message)
        self.page_size = page_size
        self._limits = limits
        self._num_kv_heads = num_kv_heads
        self._group = shape.num_heads // num_kv_heads
        self._head_size = head_size
        self._scale = shape.scale
        self._sinks = shape.sinks
        self._padding = -self._group % limits.rows
        self._paging = Paging(
            num_kv_heads=num_kv_heads,
            page_size=page_size,
            width_of=self._width_of,
            max_units=max(1, UNIT_BYTES // (2 * num_kv_heads * CHUNK * head_size * kv_pool.itemsize)),
            window=shape.only_window,
        )
        self._num_pairs = num_pages * num_kv_heads
        self._pages = kv_pool.view(num_layers, 2 * self._num_pairs, page_size * head_size).unbind(0)
        self._slots = kv_pool.view(num_layers, 2 * self._num_pairs * page_size, head_size).unbind(0)
        self._new_slots = torch.empty(0)
        self._decode: DecodeRows | None = None
        self._pages_of: list[Tensor] = []
        self._prefill: list[_PrefillRow] = []

    def prepare(self, batch: ForwardBatch) -> None:
        self._new_slots = self._both(self._paging.new_slots(batch.slot_mapping), self._num_pairs * self.page_size)
        self._decode = self._paging.decode_rows(batch)
        self._pages_of = (
            [self._both(units.pages, self._num_pairs) for units in self._decode.units] if self._decode else []
        )
        starts = first_tokens(batch.query_lengths)
        self._prefill = [
            self._prefill_row(batch, row, starts[row]) for row, length in enumerate(batch.query_lengths) if length > 1
        ]

    def target(self, layer: int) -> WriteKV:
        return partial(self._write, self._slots[layer])

    def _write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k and v [T, K, E] to their slots, [2 * N * K * S, E] of a layer: keys, then values."""
        slots.index_copy_(0, self._new_slots, torch.stack((k, v)).view(-1, self._head_size))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [T, H, E], k and v [T, K, E] -> [T, H * E]."""
        if self._decode and self._decode.tokens is None:
            return self._attend_decode(self._decode, q, layer)
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype)
        if self._decode and self._decode.tokens is not None:
            attended = self._attend_decode(self._decode, q.index_select(0, self._decode.tokens), layer)
            out.index_copy_(0, self._decode.tokens, attended)
        for row in self._prefill:
            self._attend_prefill(row, q, layer, out)
        return out

    def _both(self, of_keys: Tensor, offset: int) -> Tensor:
        """Indices [X] of keys -> [2 X], those of keys, then those of values, which stand ``offset`` behind them."""
        return torch.cat((of_keys, of_keys + offset))

    def _width_of(self, visible: int) -> int:
        return next(width for width in self._limits.widths if width >= visible and width % self.page_size == 0)

    def _gather(self, layer: int, pages: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Keys and values, [chunks, K, C, E] each, where C is ``width``."""
        gathered = self._pages[layer].index_select(0, pages)
        keys, values = gathered.view(2, -1, self._num_kv_heads, width, self._head_size).unbind(0)
        return keys, values

    def _attend_decode(self, decode: DecodeRows, q: Tensor, layer: int) -> Tensor:
        """[R, H, E] -> [R, H * E]."""
        queries = q.reshape(decode.num_rows, self._num_kv_heads, self._group, self._head_size)
        if self._padding:
            queries = functional.pad(queries, (0, 0, 0, self._padding))
        if decode.num_slots == 1 and not self._sinks:
            each = zip(decode.units, self._pages_of, strict=True)
            found = [self._attend_units(queries, units, pages, layer)[0] for units, pages in each]
            merged = torch.cat(found) if len(found) > 1 else found[0]
        else:
            outputs, sums = self._decode_sums(decode, queries, layer)
            if self._sinks:
                sinks = functional.pad(self._grouped_sinks(layer), (0, self._padding))
                outputs, sums = _with_sinks(outputs, sums, sinks)
            merged = _combine(outputs, sums).to(q.dtype)
        return merged[:, :, : self._group].reshape(decode.num_rows, -1)

    def _decode_sums(self, decode: DecodeRows, queries: Tensor, layer: int) -> Sums:
        """[R, K, M, E] queries -> sums [X, R, K, M, ...], with no weight where a row has no such chunk."""
        num_places = decode.num_slots * decode.num_rows
        outputs = queries.new_zeros(num_places, *queries.shape[1:])
        sums = queries.new_full((num_places, *queries.shape[1:3]), MASKED, dtype=torch.float32)
        for units, pages in zip(decode.units, self._pages_of, strict=True):
            of_units = self._attend_units(queries, units, pages, layer)
            outputs.index_copy_(0, units.places, of_units[0])
            sums.index_copy_(0, units.places, of_units[1])
        shape = (decode.num_slots, decode.num_rows)
        return torch.unflatten(outputs, 0, shape), torch.unflatten(sums, 0, shape)

    def _attend_units(self, queries: Tensor, units: Units, pages: Tensor, layer: int) -> Sums:
        """[R, K, M, E] queries -> [U, K, M, ...]."""
        keys, values = self._gather(layer, pages, units.width)
        num_units = units.rows.shape[0]
        chosen = queries.index_select(0, units.rows)
        if units.hidden is not None:
            return _attend(chosen, keys, values, hidden=units.hidden.unsqueeze(1), scale=self._scale)
        together = chosen.transpose(0, 1).reshape(1, self._num_kv_heads, -1, self._head_size)
        outputs, sums = _attend(together, keys, values, hidden=None, scale=self._scale)
        shape = (num_units, -1)
        return torch.unflatten(outputs[0], 1, shape).transpose(0, 1), torch.unflatten(sums[0], 1, shape).transpose(0, 1)

    def _prefill_row(self, batch: ForwardBatch, row: int, start: int) -> _PrefillRow:
        count, kv_length = batch.query_lengths[row], batch.kv_lengths[row]
        table = self._paging.chunk_table(batch.page_table[row : row + 1], -(-kv_length // CHUNK))
        first = kv_length - count
        first_chunk = self._paging.first_seen(first) // CHUNK
        blocks = []
        for offset in range(0, count, BLOCK_TOKENS):
            size = min(BLOCK_TOKENS, count - offset)
            position = first + offset
            last = position + torch.arange(size + -size % self._limits.rows)
            blocks.append(_Block(start + offset, start + offset + size, self._chunks(last, size, first_chunk)))
        pages = self._paging.pairs(table[0, first_chunk:])
        return _PrefillRow(pages=self._both(pages, self._num_pairs), blocks=blocks)

    def _chunks(self, last: Tensor, size: int, first_chunk: int) -> list[_Chunk]:
        """What ``size`` tokens see of each chunk; ``last`` [padded M]: the last position that each attends to.

        first_chunk: of those that the row gathers.
        """
        paging = self._paging
        num_visible, num_visible_to_all = int(last[size - 1]) + 1, int(last[0]) + 1
        first_visible_to_all = paging.first_seen(num_visible - 1)
        chunks: list[_Chunk] = []
        for begin in range(paging.first_seen(int(last[0])) // CHUNK * CHUNK, num_visible, CHUNK):
            chunk, width = begin // CHUNK, self._width_of(min(CHUNK, num_visible - begin))
            hidden: Tensor | None = None
            if begin + width > num_visible_to_all or begin < first_visible_to_all:
                columns = torch.arange(begin, begin + width)
                is_hidden = columns > last.unsqueeze(1)
                if paging.window is not None:
                    is_hidden |= columns <= last.unsqueeze(1) - paging.window
                hidden = is_hidden * MASKED
            chunks.append(_Chunk(chunk - first_chunk, paging.slot(chunk), width, hidden))
        return chunks

    def _grouped_sinks(self, layer: int) -> Tensor:
        """[K, G] in fp32."""
        return self._sinks[layer].float().view(self._num_kv_heads, self._group)

    def _attend_prefill(self, row: _PrefillRow, q: Tensor, layer: int, out: Tensor) -> None:
        """The tokens of a prefill row: q [T, H, E] of the step -> their rows of out [T, H * E]."""
        kv_heads, group, head_size = self._num_kv_heads, self._group, self._head_size
        keys, values = self._gather(layer, row.pages, CHUNK)
        for block in row.blocks:
            size = block.stop - block.start
            queries = q[block.start : block.stop].view(size, kv_heads, group, head_size).permute(1, 2, 0, 3)
            if padding := -size % self._limits.rows:
                queries = functional.pad(queries, (0, 0, 0, padding))
            parts: dict[int, Sums] = {}
            for chunk in block.chunks:
                seen = (part[chunk.number, :, None, : chunk.width].expand(-1, group, -1, -1) for part in (keys, values))
                mask = None if chunk.hidden is None else chunk.hidden.view(1, 1, *chunk.hidden.shape)
                parts[chunk.slot] = _attend(queries, *seen, hidden=mask, scale=self._scale)
            if len(parts) == 1 and not self._sinks:
                [(merged, _)] = parts.values()
            else:
                outputs, sums = _by_slot(parts)
                if self._sinks:
                    outputs, sums = _with_sinks(outputs, sums, self._grouped_sinks(layer).unsqueeze(-1))
                merged = _combine(outputs, sums)
            target = out[block.start : block.stop].view(size, kv_heads, group, head_size)
            target.copy_(merged[:, :, :size].permute(2, 0, 1, 3))


PLUGIN = FusedAttention
