"""Divides decode rows into units for ``attention/fused.py``.

A *chunk* is ``CHUNK`` consecutive positions of a row. A *unit* is one chunk of one row. One kernel call computes many
units. If many rows share a chunk (they have the same pages), one call computes it for all of them.

The result of each chunk is stored in a *slot* of its row (not a KV slot), and the slots are merged at the end. Without
a window, the slot of a chunk is its index. With a window, a token sees few chunks, so chunks reuse the slots
cyclically. The slot of a chunk never depends on other rows, so the chunks are always merged in the same order.

R rows, K kv heads, U units, C positions of a chunk, P pages of a chunk, X chunks of the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from aioengine.attention._base import ForwardBatch

CHUNK = 512
"""Number of positions that the kernel processes at a time."""
MASKED = -1.0e30
"""Added to the score of a hidden position, so that its weight is 0. It is finite: with -inf, the result of a chunk with
only hidden positions would be NaN.
"""
BLOCK_TOKENS = 128
"""Tokens of a prefill row computed in one call. More tokens would compute more masked scores."""
MIN_SHARING = 4
"""Minimum number of rows for which a shared chunk gets its own call."""


@dataclass(frozen=True, slots=True)
class WorkUnits:
    """The units of one kernel call, or one chunk shared by all ``rows``.

    Attributes:
        rows: [U] index of the row of each unit, among the decode rows.
        targets: [U] index of the result of each unit: slot * R + row.
        pages: indices of (page, kv head) pairs in the pool: [U * K * P], or [K * P] if shared.
        width: C; chunks with fewer positions are padded.
        hidden: [U, 1, C] mask added to the scores; None if shared.
    """

    rows: Tensor
    targets: Tensor
    pages: Tensor
    width: int
    hidden: Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeUnits:
    """The decode rows of a batch, divided into units.

    Attributes:
        num_slots: maximum number of slots of a row.
        tokens: [R] index of the token of each row in the batch; None: the batch has only decode rows.
    """

    num_rows: int
    num_slots: int
    tokens: Tensor | None
    units: list[WorkUnits]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """The layout of positions in pages and chunks.

    Attributes:
        page_size: divides ``CHUNK``.
        padded_width: maps the number of visible positions of a chunk to the number that the kernel computes.
        max_units: maximum number of units per call.
        window: the number of positions that a token attends to; None: all.

    Raises:
        ValueError: the page size does not divide ``CHUNK``.
    """

    num_kv_heads: int
    page_size: int
    padded_width: Callable[[int], int]
    max_units: int
    window: int | None = None

    def __post_init__(self) -> None:
        if CHUNK % self.page_size:
            message = (
                f"page_size {self.page_size} does not divide {CHUNK}, as 'fused' requires; 'torch' accepts any size"
            )
            raise ValueError(message)

    @property
    def max_slots(self) -> int | None:
        """A power of two above the number of chunks that a block of prefill tokens sees; None: one slot per chunk."""
        if self.window is None:
            return None
        return 1 << ((self.window + BLOCK_TOKENS - 2) // CHUNK + 1).bit_length()

    def slot(self, chunk: int) -> int:
        return chunk if self.max_slots is None else chunk % self.max_slots

    def num_slots(self, num_chunks: int) -> int:
        return num_chunks if self.max_slots is None else min(num_chunks, self.max_slots)

    def first_seen(self, position: int) -> int:
        """Return the first position that a token at ``position`` attends to."""
        return 0 if self.window is None else max(position - self.window + 1, 0)

    def new_slots(self, slot_mapping: Tensor) -> Tensor:
        """Convert KV slots [T] to indices [T * K] of (page, kv head, offset) triples in the pool."""
        pages, offsets = slot_mapping // self.page_size, slot_mapping % self.page_size
        heads = (pages * self.num_kv_heads).unsqueeze(1) + torch.arange(self.num_kv_heads, device=slot_mapping.device)
        return (heads * self.page_size + offsets.unsqueeze(1)).flatten()

    def chunk_table(self, page_table: Tensor, num_chunks: int) -> Tensor:
        """Divide a page table [R, pages] into the page ids of each chunk [R, X, P], padded with page 0."""
        num_rows, num_columns = page_table.shape
        chunk_pages = CHUNK // self.page_size
        table = page_table.new_zeros(num_rows, num_chunks * chunk_pages, dtype=torch.int64)
        used = min(num_columns, table.shape[1])
        table[:, :used] = page_table[:, :used]
        return table.view(num_rows, num_chunks, chunk_pages)

    def pairs(self, pages: Tensor) -> Tensor:
        """Convert page ids [U, P] to indices [U * K * P] of (page, kv head) pairs in the pool."""
        heads = torch.arange(self.num_kv_heads, device=pages.device)
        return ((pages * self.num_kv_heads).unsqueeze(1) + heads.unsqueeze(1)).flatten()

    def decode_units(self, batch: ForwardBatch) -> DecodeUnits | None:
        """Divide the decode rows (rows of one token) into units. None: there are no decode rows."""
        single = [row for row, length in enumerate(batch.query_lengths) if length == 1]
        if not single:
            return None
        is_all = len(single) == len(batch.query_lengths)
        device = batch.page_table.device
        kv_lengths = [batch.kv_lengths[row] for row in single]
        num_chunks = -(-max(kv_lengths) // CHUNK)
        page_table = batch.page_table if is_all else batch.page_table[torch.tensor(single, device=device)]
        table = self.chunk_table(page_table, num_chunks)
        left = torch.tensor(kv_lengths, device=device) - torch.arange(num_chunks, device=device).unsqueeze(1) * CHUNK
        shared, unshared = self._find_shared(table, left)
        first_seen: Tensor | None = None
        if self.window is not None:
            first_seen = torch.tensor([self.first_seen(length - 1) for length in kv_lengths], device=device)
            ends = torch.arange(CHUNK, (num_chunks + 1) * CHUNK, CHUNK, device=device)
            unshared &= ends.unsqueeze(1) > first_seen
        chunks, rows = torch.nonzero(unshared, as_tuple=True)
        units = [
            self._own_chunks(table, left, row, chunk, first_seen=first_seen)
            for row, chunk in zip(rows.split(self.max_units), chunks.split(self.max_units), strict=True)
            if row.numel()
        ]
        starts = first_tokens(batch.query_lengths)
        tokens = None if is_all else torch.tensor([starts[row] for row in single], device=device)
        num_slots = self.num_slots(num_chunks)
        return DecodeUnits(num_rows=len(single), num_slots=num_slots, tokens=tokens, units=shared + units)

    def _own_chunks(
        self, table: Tensor, left: Tensor, rows: Tensor, chunks: Tensor, *, first_seen: Tensor | None
    ) -> WorkUnits:
        """Return the units of one call, for chunks [U] of rows [U].

        left: [X, R] number of positions of a row from the start of a chunk to the end of the row.
        first_seen: [R] first position that each row attends to; None: 0.
        """
        visible = left[chunks, rows]
        width = self.padded_width(min(CHUNK, int(visible.max())))
        pages = self.pairs(table[rows, chunks, : width // self.page_size])
        columns = torch.arange(width, device=table.device)
        is_hidden = columns >= visible.unsqueeze(1)
        slots = chunks
        if first_seen is not None:
            is_hidden |= columns < (first_seen[rows] - chunks * CHUNK).unsqueeze(1)
            slots = chunks % self.num_slots(len(left))
        hidden = (is_hidden * MASKED).unsqueeze(1)
        return WorkUnits(rows, slots * left.shape[1] + rows, pages, width, hidden)

    def _find_shared(self, table: Tensor, left: Tensor) -> tuple[list[WorkUnits], Tensor]:
        """Return the full chunks that at least ``MIN_SHARING`` rows share, and a mask [X, R] of the other chunks."""
        num_rows, num_chunks, _ = table.shape
        unshared = left > 0
        shared: list[WorkUnits] = []
        if num_rows < MIN_SHARING or num_chunks == 1 or self.window is not None:
            return shared, unshared
        for chunk in range(num_chunks):
            candidates = torch.nonzero(left[chunk] >= CHUNK).squeeze(1)
            if candidates.numel() < MIN_SHARING:
                break
            pages, group, counts = table[candidates, chunk].unique(dim=0, return_inverse=True, return_counts=True)
            many = torch.nonzero(counts >= MIN_SHARING).squeeze(1).tolist()
            if not many:
                break  # rows that differ here differ in all later chunks
            for index in many:
                rows = candidates[group == index]
                unshared[chunk, rows] = False
                pairs = self.pairs(pages[index : index + 1])
                shared.append(WorkUnits(rows, chunk * num_rows + rows, pairs, CHUNK, None))
        return shared, unshared


def first_tokens(query_lengths: list[int]) -> list[int]:
    """Return the index in T of the first token of each row."""
    starts = [0]
    for length in query_lengths:
        starts.append(starts[-1] + length)
    return starts[:-1]
