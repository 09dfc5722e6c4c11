"""Divides decode rows into units for ``attention/fused.py``.

A *chunk* is ``CHUNK`` consecutive positions of a row. A *unit* is one chunk of one row. One kernel call computes many
units. If many rows share a chunk (they have the same pages), one call computes it for all of them.

The result of each chunk is stored in a *lane* of its row, and the lanes are merged at the end. Without a window, the
lane of a chunk is its index. With a window, a token sees few chunks, so chunks reuse the lanes cyclically. The lane of
a chunk never depends on other rows, so the chunks are always merged in the same order.

R rows, K kv heads, U units, C positions of a chunk, P pages of a chunk, X chunks of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aioengine.attention._base import ForwardBatch
from aioengine.kernels.arrays import Ints32, Ints64

CHUNK = 512
"""Number of positions that the kernel processes at a time."""
MASKED = -1.0e38
"""Added to the score of a hidden position, so that its weight is 0, even if an earlier owner of its page has left huge
keys there. It is finite: with -inf, the result of a chunk with only hidden positions would be NaN.
"""
BLOCK_TOKENS = 128
"""Tokens of a prefill row computed in one call. More tokens would compute more masked scores."""
MIN_SHARING = 4
"""Minimum number of rows for which a shared chunk gets its own call."""


class WorkUnits(NamedTuple):
    """The units of one kernel call, or one chunk shared by several rows.

    Attributes:
        rows: [U] index of the row of each unit, among the decode rows; None: the units are all rows, in order.
        targets: [U] index of the result of each unit: lane * R + row.
        pages: [2 * U * K * P], see ``Paging.pairs``; [2 * K * P] if shared.
        width: C; chunks with fewer positions are padded.
        mask: [U, 1, 1, C] added to the scores; None if shared.
    """

    rows: Tensor | None
    targets: Tensor
    pages: Tensor
    width: int
    mask: Tensor | None


class DecodeUnits(NamedTuple):
    """The decode rows of a batch, divided into units.

    Attributes:
        num_lanes: maximum number of lanes of a row.
        tokens: [R] index of the token of each row in the batch; None: the batch has only decode rows.
    """

    num_rows: int
    num_lanes: int
    tokens: Tensor | None
    units: list[WorkUnits]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """The layout of positions in pages and chunks.

    Attributes:
        num_pages: pages of the pool, N. The pool has the (page, kv head) pairs of keys, then those of values.
        page_size: divides ``CHUNK``.
        padded_width: maps the number of visible positions of a chunk to the number that the kernel computes.
        max_positions: maximum positions of the units of a call, if it has several units.
        window: the number of positions that a token attends to; None: all.
    """

    num_kv_heads: int
    num_pages: int
    page_size: int
    padded_width: Callable[[int], int]
    max_positions: int
    window: int | None = None

    @property
    def max_lanes(self) -> int | None:
        """A power of two above the number of chunks that a block of prefill tokens sees; None: one lane per chunk."""
        if self.window is None:
            return None
        return 1 << ((self.window + BLOCK_TOKENS - 2) // CHUNK + 1).bit_length()

    def lane(self, chunk: int) -> int:
        return chunk if self.max_lanes is None else chunk % self.max_lanes

    def num_lanes(self, num_chunks: int) -> int:
        return num_chunks if self.max_lanes is None else min(num_chunks, self.max_lanes)

    def first_seen(self, position: int) -> int:
        """Return the first position that a token at ``position`` attends to."""
        return 0 if self.window is None else max(position - self.window + 1, 0)

    def new_slots(self, slot_mapping: Tensor) -> Tensor:
        """Convert KV slots [T] to indices [2 * T * K] of (page, kv head, offset) triples of keys, then of values."""
        pages, offsets = np.divmod(slot_mapping.numpy(), self.page_size)
        pairs = self._pair_indices(pages)
        return torch.from_numpy((pairs * self.page_size + offsets[:, np.newaxis]).ravel())

    def _pair_indices(self, pages: Ints64) -> Ints64:
        """Convert page ids [...] to indices [2, ..., K] of (page, kv head) pairs of keys and of values."""
        sides = np.arange(2).reshape(2, *(1,) * pages.ndim, 1) * (self.num_pages * self.num_kv_heads)
        return sides + (pages * self.num_kv_heads)[..., np.newaxis] + np.arange(self.num_kv_heads)

    def chunk_table(self, page_table: Ints32, num_chunks: int) -> Ints64:
        """Divide a page table [R, pages] into the page ids of each chunk [R, X, P], padded with page 0."""
        num_rows, num_columns = page_table.shape
        chunk_pages = CHUNK // self.page_size
        table = np.zeros((num_rows, num_chunks * chunk_pages), np.int64)
        used = min(num_columns, table.shape[1])
        table[:, :used] = page_table[:, :used]
        return table.reshape(num_rows, num_chunks, chunk_pages)

    def pairs(self, pages: Ints64) -> Tensor:
        """Convert page ids [U, P] to indices [2 * U * K * P] of (page, kv head) pairs of keys, then of values."""
        return torch.from_numpy(self._pair_indices(pages).swapaxes(2, 3).ravel())

    def decode_units(self, batch: ForwardBatch) -> DecodeUnits | None:
        """Divide the decode rows (rows of one token) into units. None: there are no decode rows."""
        single = [row for row, length in enumerate(batch.query_lengths) if length == 1]
        if not single:
            return None
        is_all = len(single) == len(batch.query_lengths)
        kv_lengths, page_table = np.array(batch.kv_lengths), batch.page_table.numpy()
        if not is_all:
            kv_lengths, page_table = kv_lengths[single], page_table[single]
        num_chunks = -(-int(kv_lengths.max()) // CHUNK)
        table = self.chunk_table(page_table, num_chunks)
        left = kv_lengths - np.arange(num_chunks)[:, np.newaxis] * CHUNK
        shared, unshared = self._find_shared(table, left)
        first_seen: Ints64 | None = None
        if self.window is not None:
            first_seen = np.maximum(kv_lengths - self.window, 0)
            ends = np.arange(1, num_chunks + 1) * CHUNK
            unshared &= ends[:, np.newaxis] > first_seen
        chunks, rows = np.nonzero(unshared)
        width = self.padded_width(min(CHUNK, int(kv_lengths.max())))
        max_units = max(1, self.max_positions // width)
        calls = [slice(start, start + max_units) for start in range(0, len(rows), max_units)]
        units = [self._own_chunks(table, left, rows[call], chunks[call], first_seen=first_seen) for call in calls]
        tokens: Tensor | None = None
        if not is_all:
            starts = first_tokens(batch.query_lengths)
            tokens = torch.tensor([starts[row] for row in single])
        num_lanes = self.num_lanes(num_chunks)
        return DecodeUnits(num_rows=len(single), num_lanes=num_lanes, tokens=tokens, units=shared + units)

    def _own_chunks(
        self, table: Ints64, left: Ints64, rows: Ints64, chunks: Ints64, *, first_seen: Ints64 | None
    ) -> WorkUnits:
        """Return the units of one call, for chunks [U] of rows [U].

        left: [X, R] number of positions of a row from the start of a chunk to the end of the row.
        first_seen: [R] first position that each row attends to; None: 0.
        """
        num_chunks, num_rows = left.shape
        visible = left[chunks, rows]
        width = self.padded_width(min(CHUNK, int(visible.max())))
        pages = self.pairs(table[rows, chunks, : width // self.page_size])
        columns = np.arange(width)
        is_hidden = columns >= visible[:, np.newaxis]
        lanes = chunks
        if first_seen is not None:
            is_hidden |= columns < (first_seen[rows] - chunks * CHUNK)[:, np.newaxis]
            lanes = chunks % self.num_lanes(num_chunks)
        mask = torch.from_numpy((is_hidden * np.float32(MASKED))[:, np.newaxis, np.newaxis])
        is_all = num_chunks == 1 and len(rows) == num_rows
        targets = torch.from_numpy(lanes * num_rows + rows)
        return WorkUnits(None if is_all else torch.from_numpy(rows), targets, pages, width, mask)

    def _find_shared(self, table: Ints64, left: Ints64) -> tuple[list[WorkUnits], npt.NDArray[np.bool_]]:
        """Return the full chunks that at least ``MIN_SHARING`` rows share, and a mask [X, R] of the other chunks."""
        num_rows, num_chunks, _ = table.shape
        unshared = left > 0
        shared: list[WorkUnits] = []
        if num_rows < MIN_SHARING or num_chunks == 1 or self.window is not None:
            return shared, unshared
        for chunk in range(num_chunks):
            candidates = np.flatnonzero(left[chunk] >= CHUNK)
            if len(candidates) < MIN_SHARING:
                break
            pages, group, counts = np.unique(table[candidates, chunk], axis=0, return_inverse=True, return_counts=True)
            many = np.flatnonzero(counts >= MIN_SHARING).tolist()
            if not many:
                break  # rows that differ here differ in all later chunks
            for index in many:
                rows = candidates[group.ravel() == index]
                unshared[chunk, rows] = False
                pairs = self.pairs(pages[index : index + 1])
                targets = torch.from_numpy(chunk * num_rows + rows)
                shared.append(WorkUnits(torch.from_numpy(rows), targets, pairs, CHUNK, None))
        return shared, unshared


def first_tokens(query_lengths: list[int]) -> list[int]:
    """Return the index in T of the first token of each row."""
    starts = [0]
    for length in query_lengths:
        starts.append(starts[-1] + length)
    return starts[:-1]
