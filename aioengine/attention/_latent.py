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
from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.attention._base import ForwardBatch, keys_and_values, split_heads
from aioengine.attention._gpu_rows import flat_pages, page_columns, pinned, plan_page_0, starts_of, tiles_of
from aioengine.kernels import head_linear
from aioengine.kernels.rotate_and_write import KVTarget
from aioengine.kernels.triton import attention, expanded_attention, latent_decode
from aioengine.kernels.triton.attention import PagedRows
from aioengine.kernels.triton.expanded_attention import ExpandedKV, ExpandedTiles
from aioengine.kernels.triton.latent_decode import Parts

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from aioengine.attention._base import AttentionShape, DecodeBuffers

    Ints = npt.NDArray[np.int32]

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
    most = max(few, LONG_ROW_PARTS) if longest > latent_decode.LONG.value else few
    few, most = (1 << (min(count, limit).bit_length() - 1) for count in (few, most))
    return Parts(few, most)


def first_expanded(query_lengths: Ints, kv_lengths: Ints, page_size: int, most: int) -> int:
    """Return the first expanded row. All rows after it are expanded too, so that the tokens of each form are adjacent.

    query_lengths, kv_lengths: [R]. most: maximum number of expanded positions, in whole pages.
    """
    tokens, lengths = query_lengths[::-1].astype(np.int64), kv_lengths[::-1].astype(np.int64)
    positions = -(-lengths // page_size) * page_size
    pairs = tokens * lengths - tokens * (tokens - 1) // 2
    gains = (pairs + TOKEN_PAIRS * tokens - POSITION_PAIRS * positions).cumsum()
    gains[positions.cumsum() > most] = 0
    best = int(gains.argmax())
    return len(tokens) - (best + 1 if gains[best] > 0 else 0)


@dataclass(frozen=True, slots=True)
class _LatentStep:
    """A prepared step: first rows of one token, then other rows in the absorbed form, then expanded rows.

    Attributes:
        slots: [T], KV slots of the step's tokens. rows: all rows.
        num_decode: number of rows of one token. parts: how these rows are divided.
        num_absorbed: number of tokens in the absorbed form.
        absorbed_tiles: [X, 2] int32, tiles of the other absorbed rows, as for ``kernels.triton.attention.attend``.
        expanded_tiles: tiles of the expanded rows.
        first_page: start of the expanded rows in ``rows.page_ids``.
        heads_at_once: number of heads that are expanded at once.
    """

    slots: Tensor
    rows: PagedRows
    num_decode: int
    parts: Parts
    num_absorbed: int
    absorbed_tiles: Tensor | None = None
    expanded_tiles: ExpandedTiles | None = None
    first_page: int = 0
    heads_at_once: int = 1

    def attend(self, shape: AttentionShape, q: Tensor, keys: Tensor, expansion: Tensor, *, out: Tensor) -> None:
        """Attend with q [T, H, N + P] and expansion [H, N + O, V] to keys [B, 1, S, E] into ``out`` [T, H, O]."""
        count = self.num_absorbed
        if count:
            self._attend_absorbed(shape, q[:count], keys, expansion, out=out[:count])
        if self.expanded_tiles is not None:
            self._attend_expanded(shape, q, keys, expansion, out=out)

    def _attend_absorbed(
        self, shape: AttentionShape, q: Tensor, keys: Tensor, expansion: Tensor, *, out: Tensor
    ) -> None:
        """Attend in the absorbed form: q [T, H, N + P] -> out [T, H, O]."""
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
        self, shape: AttentionShape, q: Tensor, keys: Tensor, expansion: Tensor, *, out: Tensor
    ) -> None:
        """Attend in the expanded form, some heads at a time: q [T, H, N + P] -> out [T, H, O]."""
        assert self.expanded_tiles is not None, "no row is expanded"
        num_heads, size, value_size = expansion.shape
        pages = keys.flatten(1).index_select(0, self.rows.page_ids[self.first_page :])
        latents, rotated = pages.view(-1, keys.shape[3]).tensor_split((value_size,), dim=1)
        for first in range(0, num_heads, self.heads_at_once):
            heads = slice(first, first + self.heads_at_once)
            expanded = torch.mm(latents, expansion[heads].flatten(0, 1).t()).view(len(latents), -1, size)
            kv = ExpandedKV(expanded, rotated, keys.shape[2], self.first_page)
            expanded_attention.attend(
                q[:, heads], kv, self.rows, self.expanded_tiles, scale=shape.scale, out=out[:, heads]
            )


class AdaptiveLatentAttention:
    """Implements ``CapturableAttention`` for shapes with ``expansions``, in 16 bits."""

    def __init__(self, shape: AttentionShape, kv_pool: Tensor) -> None:
        """kv_pool: [L, 1, B, 1, S, E]."""
        self._shape = shape
        self._pool = keys_and_values(kv_pool, shape)
        self._device = kv_pool.device
        self._step: _LatentStep | None = None

    def prepare(self, batch: ForwardBatch) -> None:
        shape, keys = self._shape, self._pool[0][0]
        kv_lengths = np.array(batch.kv_lengths, dtype=np.int32)
        query_lengths = np.array(batch.query_lengths, dtype=np.int32)
        page_starts, last_lengths = page_columns(kv_lengths, keys.shape[2])
        on_device, page_ids = flat_pages(batch.page_table, page_starts)
        rows = PagedRows(self._upload(starts_of(query_lengths)), on_device, self._upload(last_lengths), page_ids)
        longer = np.flatnonzero(query_lengths > 1)
        num_decode = int(longer[0]) if longer.size else len(query_lengths)
        most = MAX_COPY_BYTES // (shape.head_size * keys.itemsize)
        expanded = max(first_expanded(query_lengths, kv_lengths, keys.shape[2], most), num_decode)
        step = _LatentStep(
            slots=batch.slot_mapping,
            rows=rows,
            num_decode=num_decode,
            parts=plan_parts(shape, max(num_decode, 1), int(kv_lengths[: max(num_decode, 1)].max())),
            num_absorbed=int(query_lengths[:expanded].sum()),
        )
        if expanded > num_decode:
            absorbed_lengths = query_lengths[:expanded].copy()
            absorbed_lengths[:num_decode] = 0
            tokens_of_tile = attention.head_group(shape.num_heads, self._pool[0]).tokens
            step = replace(step, absorbed_tiles=self._upload(pinned(tiles_of(absorbed_lengths, tokens_of_tile))))
        if expanded < len(query_lengths):
            step = self._with_expanded(step, query_lengths, page_starts, expanded)
        self._step = step

    def _with_expanded(
        self, step: _LatentStep, query_lengths: Ints, page_starts: Tensor, first_row: int
    ) -> _LatentStep:
        """Return the step with rows from ``first_row`` on expanded. page_starts: [R + 1] on the host."""
        shape, keys = self._shape, self._pool[0][0]
        first_page, last_page = int(page_starts[first_row]), int(page_starts[-1])
        head_bytes = (last_page - first_page) * keys.shape[2] * shape.expansions[0].shape[1] * keys.itemsize
        heads_at_once = min(max(MAX_EXPANDED_BYTES // head_bytes, 1), shape.num_heads)
        lengths = query_lengths.copy()
        lengths[:first_row] = 0
        tile = expanded_attention.tile_for(int(lengths.sum()), heads_at_once)
        starts = tiles_of(lengths, tile.rows)[::-1].copy()  # slowest tiles first
        tiles = ExpandedTiles(self._upload(pinned(starts)), tile)
        return replace(step, expanded_tiles=tiles, first_page=first_page, heads_at_once=heads_at_once)

    def target(self, layer: int) -> KVTarget:
        assert self._step is not None, "prepare was not called"
        return KVTarget(self._step.slots, *self._pool[layer])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Attend with q [T, H, N + P] -> [T, H * O]; k and v are read in the pool."""
        out = q.new_empty(*q.shape[:2], self._shape.output_size)
        self.attend_into(q, k, v, layer, out=out)
        return out.flatten(1)

    def attend_into(self, q: Tensor, k: Tensor, v: Tensor, layer: int, *, out: Tensor) -> None:
        """q [T, H, N + P] -> out [T, H, O]."""
        assert self._step is not None, "prepare was not called"
        self._step.attend(self._shape, q, self._pool[layer][0], self._shape.expansions[layer], out=out)

    def fixed_decode(self, num_rows: int, buffers: DecodeBuffers) -> FixedLatentDecode:
        """Return attention for decode steps of ``num_rows`` rows."""
        return FixedLatentDecode(self._shape, self._pool, num_rows, buffers)

    def warm_up(self) -> None:
        """Compile the kernels of all forms: rows of one token, and one row of few and of many tokens."""
        shape, keys = self._shape, self._pool[0][0]
        small, large = (tile.rows for tile in (expanded_attention.SMALL, expanded_attention.LARGE))
        enough = large * -(-expanded_attention.ENOUGH_PROGRAMS // shape.num_heads)
        for num_rows, count in (*((1 << power, 1) for power in range(9)), (1, 2), (1, small), (1, enough)):
            num_pages = -(-count // keys.shape[2])
            batch = ForwardBatch(
                slot_mapping=torch.zeros(num_rows * count, dtype=torch.int64, device=self._device),  # never written
                page_table=torch.zeros(num_rows, num_pages, dtype=torch.int32, device=self._device),
                query_lengths=[count] * num_rows,
                kv_lengths=[count] * num_rows,
            )
            self.prepare(batch)
            heads = keys.new_zeros(num_rows * count, shape.num_input_heads, shape.query_size)
            self.attend(*split_heads(heads, shape), 0)

    def _upload(self, column: Tensor) -> Tensor:
        """Copy a pinned column [X] to the device."""
        return column.to(self._device, non_blocking=True)


class FixedLatentDecode:
    """Implements ``FixedDecode`` without plans: the kernels read the lengths on the device."""

    def __init__(
        self, shape: AttentionShape, pool: list[tuple[Tensor, Tensor]], num_rows: int, buffers: DecodeBuffers
    ) -> None:
        """pool: for each layer, keys [B, 1, S, E] and values [B, 1, S, V]."""
        numbers = torch.arange(num_rows + 1, dtype=torch.int32, device=buffers.starts.device)
        self._shape = shape
        self._pool = pool
        self._step = _LatentStep(
            slots=buffers.slot_mapping,
            rows=PagedRows(numbers, buffers.starts, buffers.last_lengths, buffers.page_ids),
            num_decode=num_rows,
            parts=plan_parts(shape, num_rows, buffers.max_pages * pool[0][0].shape[2]),
            num_absorbed=num_rows,
        )

    def plan_first(self, kv_lengths: Ints) -> None:
        """Fill the buffers for rows of ``kv_lengths`` [R] positions, all on page 0."""
        plan_page_0(self._step.rows, kv_lengths, self._pool[0][0].shape[2])

    def plan(self, starts: Tensor, last_lengths: Tensor) -> None:
        """Do nothing: the kernels read starts [R + 1] and last_lengths [R] on the device."""

    def target(self, layer: int) -> KVTarget:
        return KVTarget(self._step.slots, *self._pool[layer])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Attend with q [R, H, N + P] -> [R, H * O]; k and v are read in the pool."""
        out = q.new_empty(*q.shape[:2], self._shape.output_size)
        self._step.attend(self._shape, q, self._pool[layer][0], self._shape.expansions[layer], out=out)
        return out.flatten(1)
