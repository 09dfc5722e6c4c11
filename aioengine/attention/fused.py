"""Attention of a CPU in chunks, batch-invariant.

As in ``attention/torch.py``, the result of a token has the same bits alone, in any batch, in a decode step and in any
prefill chunk. Keys are processed in chunks of ``CHUNK`` positions aligned from position 0. A kernel computes a chunk
(``_cpu_kernels``). The chunks of a token are merged in an order that chunks without weight do not change.
``find_limits`` tries which numbers of query rows and positions give the bits of a full chunk; if there are none,
``attention/torch.py`` is used instead.

T packed tokens, R rows, H query heads, K kv heads, G query heads per kv head, E head size, U units, C positions of a
chunk, N pages of the pool, S page size, P pages of a chunk, M padded query rows per kv head, X chunks of the longest
row.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from aioengine.attention._base import AttentionShape, ForwardBatch
from aioengine.attention._cpu_kernels import ChunkResult, attend_by_products, limits_of, merge
from aioengine.attention._cpu_units import BLOCK_TOKENS, CHUNK, MASKED, DecodeUnits, Paging, WorkUnits, first_tokens
from aioengine.kernels.kv_target import WriteKV, from_stored, to_stored

UNIT_BYTES = 4 << 20
"""Size of keys and values per call; they fit the caches."""
SHARED_ROWS = 256
"""Multiples of this number of query rows that share a chunk are full blocks, see ``attend_by_products``."""


def supports(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether this backend can be used. The kernel supports neither soft caps nor smaller values than keys."""
    if shape.soft_cap is not None or shape.value_size is not None:
        return False
    if device.type != "cpu" or not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return False
    return limits_of(shape, dtype) is not None


def _by_lane(parts: dict[int, ChunkResult]) -> ChunkResult:
    """Stack the sums [...] of lanes -> fp32 [X, ...]. Missing lanes have no weight."""
    outputs, sums = next(iter(parts.values()))
    missing = torch.zeros_like(outputs), torch.full_like(sums, MASKED)
    outputs, sums = zip(*(parts.get(lane, missing) for lane in range(max(parts) + 1)), strict=True)
    wide = outputs[0].new_empty((len(outputs), *outputs[0].shape), dtype=torch.float32)
    for lane, part in enumerate(outputs):
        wide[lane] = part
    return wide, torch.stack(sums)


class _TokenBlock(NamedTuple):
    """``size`` tokens of the step, a part of a prefill row, and the chunks that they see."""

    tokens: slice
    size: int
    chunks: list[_Chunk]


class _Chunk(NamedTuple):
    """A chunk that a block sees: index among the gathered chunks of the row, lane, width C.

    mask: [1, 1, tokens of the block, C] added to the scores, repeated for each query head of a kv head if torch's
    kernel needs it; None: the block sees the whole chunk.
    """

    index: int
    lane: int
    width: int
    mask: Tensor | None


class _PrefillRow(NamedTuple):
    """A row of several tokens. pages: [2 * X * K * P], see ``Paging.pairs``."""

    pages: Tensor
    blocks: list[_TokenBlock]


class _DecodeCall(NamedTuple):
    """A kernel call for decode rows.

    Attributes:
        memory: receives the pages, [2 * U * K * P, numbers of a page].
        stored: a view of it, keys and values [2, U, K, C, E] as stored.
        sides: keys and values [U, K, C, E] as views of it; None: they are stored in another dtype than the kernel's.
    """

    units: WorkUnits
    memory: Tensor
    stored: Tensor
    sides: tuple[Tensor, ...] | None


class FusedAttention:
    """Implements ``AttentionBackend``. The page size must divide ``CHUNK``."""

    def __init__(self, shape: AttentionShape, kv_pool: Tensor) -> None:
        """kv_pool: [L, 2, N, K, S, E].

        Raises:
            ValueError: the kernel is not batch-invariant on this machine.
        """
        num_layers, _, num_pages, num_kv_heads, page_size, stored_size = kv_pool.shape
        head_size, dtype = shape.head_size, shape.dtype or kv_pool.dtype
        limits = limits_of(shape, dtype)
        if limits is None:
            raise ValueError(f"torch's fused attention is not batch-invariant for head size {head_size} here")
        self.page_size = page_size
        self._limits = limits
        self._num_kv_heads = num_kv_heads
        self._group = shape.num_heads // num_kv_heads
        self._head_size, self._stored_size = head_size, stored_size
        self._attend, self._scale = limits.attend, shape.scale
        is_fp32 = limits.attend is attend_by_products
        # a decode step scales queries when it converts them to fp32; the kernel then has nothing to scale
        self._query_scale = torch.tensor([shape.scale]) if is_fp32 else None
        self._decode_scale = 1.0 if is_fp32 else shape.scale
        self._sinks = shape.sinks
        self._padding = -self._group % limits.rows  # query rows added per kv head of a decode row
        self._paging = Paging(
            num_kv_heads=num_kv_heads,
            num_pages=num_pages,
            page_size=page_size,
            padded_width=self._padded_width,
            max_positions=UNIT_BYTES // (2 * num_kv_heads * head_size * dtype.itemsize),
            window=shape.common_window,
        )
        self._dtype = dtype
        self._pages = kv_pool.view(num_layers, -1, page_size * stored_size).unbind(0)
        self._slots = kv_pool.view(num_layers, -1, stored_size).unbind(0)
        self._new_slots = torch.empty(0)
        self._decode: DecodeUnits | None = None
        self._calls: list[_DecodeCall] = []
        self._shapes: tuple[int, list[tuple[int, int]]] = 0, []  # of the last step: rows, and (pages, width) of calls
        self._memory = kv_pool.new_empty(0)
        # padded queries of all rows, and a view without padding
        self._queries = self._own_queries = torch.empty(0, dtype=torch.float32 if is_fp32 else dtype)
        self._prefill: list[_PrefillRow] = []

    def prepare(self, batch: ForwardBatch) -> None:
        self._new_slots = self._paging.new_slots(batch.slot_mapping)
        self._decode = self._paging.decode_units(batch)
        if self._decode is not None:
            self._prepare_decode(self._decode)
        starts = first_tokens(batch.query_lengths)
        self._prefill = [
            self._prefill_row(batch, row, starts[row]) for row, length in enumerate(batch.query_lengths) if length > 1
        ]

    def target(self, layer: int) -> WriteKV:
        return partial(self._write, self._slots[layer])

    def _write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v [T, K, E] to the slots [2 * N * K * S, ...] of a layer: keys, then values."""
        slots.index_copy_(0, self._new_slots, to_stored(torch.cat((k, v)).view(-1, self._head_size), slots.dtype))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [T, H, E], k and v [T, K, E] -> [T, H * E]."""
        decode = self._decode
        if decode and decode.tokens is None:
            return self._attend_decode(decode, q, layer)
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype)
        if decode and decode.tokens is not None:
            attended = self._attend_decode(decode, q.index_select(0, decode.tokens), layer)
            out.index_copy_(0, decode.tokens, attended)
        for row in self._prefill:
            self._attend_prefill(row, q, layer, out)
        return out

    def _prepare_decode(self, decode: DecodeUnits) -> None:
        """Allocate the memory of decode calls, which all layers use, unless the last step had the same shapes."""
        shapes = decode.num_rows, [(units.pages.numel(), units.width) for units in decode.units]
        if shapes == self._shapes:
            self._calls = [call._replace(units=units) for call, units in zip(self._calls, decode.units, strict=True)]
            return
        self._shapes, self._calls = shapes, []
        page_numbers = self.page_size * self._stored_size
        num_elements = max(num_pages for num_pages, _ in shapes[1]) * page_numbers
        if self._memory.numel() < num_elements:
            self._memory = self._memory.new_empty(num_elements)
        for units in decode.units:
            memory = self._memory[: units.pages.numel() * page_numbers].view(-1, page_numbers)
            stored = memory.view(2, -1, self._num_kv_heads, units.width, self._stored_size)
            is_plain = stored.dtype == self._dtype == self._queries.dtype
            self._calls.append(_DecodeCall(units, memory, stored, stored.unbind(0) if is_plain else None))
        shape = (decode.num_rows, self._num_kv_heads, self._group + self._padding, self._head_size)
        self._queries = self._queries.new_zeros(shape)
        self._own_queries = self._queries[:, :, : self._group]

    def _padded_width(self, visible: int) -> int:
        """Return the smallest width with which the kernel computes a chunk with ``visible`` positions."""
        return next(width for width in self._limits.widths if width >= visible and width % self.page_size == 0)

    def _attend_decode(self, decode: DecodeUnits, q: Tensor, layer: int) -> Tensor:
        """q [R, H, E] -> [R, H * E]."""
        queries = q.view(decode.num_rows, self._num_kv_heads, self._group, self._head_size)
        if self._query_scale is not None:
            torch.mul(queries, self._query_scale, out=self._own_queries)
            queries = self._queries
        elif self._padding:
            self._own_queries.copy_(queries)
            queries = self._queries
        if decode.num_lanes == 1 and not self._sinks:
            outputs = [self._attend_units(queries, call, layer)[0] for call in self._calls]
            merged = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        else:
            sinks = functional.pad(self._grouped_sinks(layer), (0, self._padding)) if self._sinks else None
            merged = merge(*self._decode_results(decode, queries, layer), sinks)
        if self._padding:
            merged = merged[:, :, : self._group]
        merged = merged.reshape(decode.num_rows, -1)
        return merged if merged.dtype == q.dtype else merged.to(q.dtype)

    def _decode_results(self, decode: DecodeUnits, queries: Tensor, layer: int) -> ChunkResult:
        """queries [R, K, M, E] -> sums [X, R, K, M, ...], without weight in lanes that a row does not use."""
        num_targets = decode.num_lanes * decode.num_rows
        outputs = queries.new_zeros(num_targets, *queries.shape[1:], dtype=torch.float32)
        sums = queries.new_full((num_targets, *queries.shape[1:3]), MASKED, dtype=torch.float32)
        for call in self._calls:
            unit_outputs, unit_sums = self._attend_units(queries, call, layer)
            outputs.index_copy_(0, call.units.targets, unit_outputs.float())
            sums.index_copy_(0, call.units.targets, unit_sums)
        shape = (decode.num_lanes, decode.num_rows)
        return torch.unflatten(outputs, 0, shape), torch.unflatten(sums, 0, shape)

    def _attend_units(self, queries: Tensor, call: _DecodeCall, layer: int) -> ChunkResult:
        """queries [R, K, M, E] -> sums [U, K, M, ...]."""
        units = call.units
        torch.index_select(self._pages[layer], 0, units.pages, out=call.memory)
        keys, values = call.sides or from_stored(call.stored, self._dtype).to(self._queries.dtype).unbind(0)
        chosen = queries if units.rows is None else queries.index_select(0, units.rows)
        if units.mask is not None:
            assert self._decode is not None
            needs_sums = self._decode.num_lanes > 1 or bool(self._sinks)
            return self._attend(chosen, keys, values, mask=units.mask, scale=self._decode_scale, needs_sums=needs_sums)
        joined = chosen.transpose(0, 1).reshape(1, self._num_kv_heads, -1, self._head_size)
        is_full_block = joined.shape[2] % SHARED_ROWS == 0
        outputs, sums = self._attend(
            joined, keys, values, mask=None, scale=self._decode_scale, is_full_block=is_full_block
        )
        shape = (len(chosen), -1)
        return torch.unflatten(outputs[0], 1, shape).transpose(0, 1), torch.unflatten(sums[0], 1, shape).transpose(0, 1)

    def _prefill_row(self, batch: ForwardBatch, row: int, start: int) -> _PrefillRow:
        """Divide a row of several tokens into blocks. start: index of its first token in the step."""
        count, kv_length = batch.query_lengths[row], batch.kv_lengths[row]
        table = self._paging.chunk_table(batch.page_table[row : row + 1].numpy(), -(-kv_length // CHUNK))
        first = kv_length - count
        first_chunk = self._paging.first_seen(first) // CHUNK
        blocks = []
        for offset in range(0, count, BLOCK_TOKENS):
            size = min(BLOCK_TOKENS, count - offset)
            last = first + offset + torch.arange(size + -size % self._limits.rows)
            tokens = slice(start + offset, start + offset + size)
            blocks.append(_TokenBlock(tokens, size, self._chunks(last, size, first_chunk)))
        return _PrefillRow(pages=self._paging.pairs(table[0, first_chunk:]), blocks=blocks)

    def _chunks(self, last: Tensor, size: int, first_chunk: int) -> list[_Chunk]:
        """Return the chunks that ``size`` tokens see.

        last: [padded M] last position that each token attends to. first_chunk: the first gathered chunk of the row.
        """
        paging = self._paging
        num_visible, num_visible_to_all = int(last[size - 1]) + 1, int(last[0]) + 1
        first_visible_to_all = paging.first_seen(num_visible - 1)
        chunks: list[_Chunk] = []
        for begin in range(paging.first_seen(int(last[0])) // CHUNK * CHUNK, num_visible, CHUNK):
            chunk, width = begin // CHUNK, self._padded_width(min(CHUNK, num_visible - begin))
            mask: Tensor | None = None
            if begin + width > num_visible_to_all or begin < first_visible_to_all:
                columns = torch.arange(begin, begin + width)
                is_hidden = columns > last.unsqueeze(1)
                if paging.window is not None:
                    is_hidden |= columns <= last.unsqueeze(1) - paging.window
                mask = is_hidden * MASKED
                if self._attend is not attend_by_products:
                    mask = mask.to(self._dtype).repeat(self._group, 1)
                mask = mask[None, None]
            chunks.append(_Chunk(chunk - first_chunk, paging.lane(chunk), width, mask))
        return chunks

    def _grouped_sinks(self, layer: int) -> Tensor:
        """Return the sinks [K, G] in fp32."""
        return self._sinks[layer].float().view(self._num_kv_heads, self._group)

    def _attend_prefill(self, row: _PrefillRow, q: Tensor, layer: int, out: Tensor) -> None:
        """Attend for the tokens of a prefill row: q [T, H, E] of the step -> their rows of out [T, H * E]."""
        kv_heads, group, head_size = self._num_kv_heads, self._group, self._head_size
        gathered = self._pages[layer].index_select(0, row.pages).view(2, -1, kv_heads, CHUNK, self._stored_size)
        keys, values = from_stored(gathered, self._dtype).unbind(0)  # [chunks, K, C, E]
        for block in row.blocks:
            shape = block.size, kv_heads, group, head_size
            queries = q[block.tokens].view(shape).permute(1, 2, 0, 3)
            if padding := -block.size % self._limits.rows:
                queries = functional.pad(queries, (0, 0, 0, padding))
            joined, num_rows = queries.reshape(1, kv_heads, -1, head_size), queries.shape[2]
            parts: dict[int, ChunkResult] = {}
            for chunk in block.chunks:
                kv = (part[chunk.index, None, :, : chunk.width] for part in (keys, values))
                outputs, sums = self._attend(
                    joined,
                    *kv,
                    mask=chunk.mask,
                    scale=self._scale,
                    is_full_block=num_rows == BLOCK_TOKENS,
                    needs_sums=len(block.chunks) > 1 or bool(self._sinks),
                )
                parts[chunk.lane] = outputs[0].unflatten(1, (group, num_rows)), sums[0].unflatten(1, (group, num_rows))
            if len(parts) == 1 and not self._sinks:
                [(merged, _)] = parts.values()
            else:
                sinks = self._grouped_sinks(layer).unsqueeze(-1) if self._sinks else None
                merged = merge(*_by_lane(parts), sinks)
            out[block.tokens].view(shape).copy_(merged[:, :, : block.size].permute(2, 0, 1, 3))


PLUGIN = FusedAttention
