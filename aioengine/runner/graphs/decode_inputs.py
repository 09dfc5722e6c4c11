"""The inputs of decode graphs: what the host writes before a replay, and how a step is padded.

All graphs read the same memory. The host writes a step into its copy of this memory, and then copies the used part to
the device in one transfer per page group. For a graph of B rows, the memory contains:

- columns [C, B]: one number per row in each, see ``SOURCES``,
- starts [B + 1] of the page tables among the page ids; usually each row has its own page table,
- page ids: the concatenated page tables.

For each further page group, there is memory of slots [B] and page ids. The groups share all other inputs.

Padding rows have one position on the padding page, and no target.

R rows of a step, T their tokens, B rows of a graph, C columns, G page groups, P pages of the longest row, X page
tables.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from aioengine.attention._base import DecodeBuffers
from aioengine.kernels.arrays import Ints32
from aioengine.kernels.triton.sampling import NUM_FIELDS
from aioengine.runner.graphs.token_rows import TokenRows
from aioengine.runner.inputs import InputBuilder, StepRows
from aioengine.runner.kv_pool import PADDING_PAGE
from aioengine.runner.request_row import SampledRows
from aioengine.runner.sampling.device_sampler import fill_fields

SOURCES, POSITIONS, SLOTS, LAST_LENGTHS, TARGETS, FIELDS = range(6)
TABLES, REJECTED = FIELDS + NUM_FIELDS, FIELDS + NUM_FIELDS + 1
"""Indices of the columns:

- sources, targets: see ``TokenRows``,
- positions: as the model reads them,
- slots, last lengths: see ``DecodeBuffers``,
- fields: the first column of ``Draws.fields``,
- tables: the number of the page table of the row; -1: ``TokenRows.device_chooses_token``,
- rejected: index in ``RowTable.rejected`` of the number of positions by which ``move_rows`` moves the row.
"""
SAMPLED = FIELDS + 2
"""The column, among the fields, with the positions of the sampled tokens."""
NUM_COLUMNS = REJECTED + 1

Array = TypeVar("Array", Tensor, Ints32)
Views = tuple[Array, Array, list[tuple[Array, Array]]]
"""The memory of a graph: columns [C, B], starts [B + 1], and for each page group slots [B] and page ids."""


class DecodeInputs:
    """The inputs of the decode graphs of a model, on the host and on the device."""

    def __init__(self, builder: InputBuilder, *, max_rows: int, short_length: int, lag: int, waits: bool) -> None:
        """builder: its table and page size are used.
        short_length: see ``InputSpec``.
        lag: as in ``move_rows``.
        waits: ``fill`` waits for ``copy`` of the previous step. Otherwise, ``copy`` copies the step on the host, too.
        """
        self._table = table = builder.table
        self._page_size = builder.page_size
        self._short_length = short_length
        self._lag = lag
        self._waits = waits
        device = table.last_tokens.device
        num_groups, _, max_pages = table.page_tables.tables.shape
        capacity = NUM_COLUMNS * max_rows + max_rows + 1 + max_rows * max_pages
        host = torch.zeros(num_groups, capacity, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host = [*host]
        self._host_arrays: list[Ints32] = [*host.numpy()]
        self._device = [*torch.zeros(num_groups, capacity, dtype=torch.int32, device=device)]
        self._ends = [0] * num_groups  # of the step in the memory of each page group
        self._copied = torch.cuda.Event()
        self._padding = np.zeros((NUM_COLUMNS, 1), dtype=np.int32)  # the columns of a padding row
        self._padding[LAST_LENGTHS], self._padding[TARGETS] = 1, -1
        self._padding[REJECTED] = len(table.is_upper_bound)

    def columns(self, size: int) -> Tensor:
        """Return the columns [C, B] of a graph of ``size`` rows on the device."""
        return _views(self._device, size)[0]

    def buffers(self, size: int) -> DecodeBuffers:
        """Return the memory that attention reads in a graph of ``size`` rows."""
        columns, starts, groups = _views(self._device, size)
        buffers = DecodeBuffers(
            slot_mapping=groups[0][0],
            starts=starts,
            last_lengths=columns[LAST_LENGTHS],
            page_ids=groups[0][1],
            max_pages=self._table.page_tables.tables.shape[2],
            are_bounds=self._table.has_upper_bounds,
            max_row_tokens=1 + self._table.max_drafts,
        )
        if len(groups) == 1:
            return buffers
        return replace(buffers, parts=[replace(buffers, slot_mapping=slots, page_ids=ids) for slots, ids in groups])

    def fill_padding(self, size: int) -> tuple[Ints32, Ints32]:
        """Write padding rows to the device memory, to capture a graph of ``size`` rows. Return starts [B + 1] and last
        lengths [B], the arguments of ``FixedDecode.plan``.
        """
        for memory in self._device:
            memory.zero_()
        columns, starts, _ = _views(self._device, size)
        columns.copy_(torch.from_numpy(self._padding))
        starts.copy_(torch.arange(size + 1))
        return np.arange(size + 1, dtype=np.int32), np.ones(size, dtype=np.int32)

    def fill(
        self, size: int, rows: StepRows, sampled: SampledRows, tokens: TokenRows, max_row_tokens: int
    ) -> tuple[Ints32, Ints32, Ints32 | None]:
        """Write a step to the host memory of a graph of ``size`` rows. Return the arguments of ``FixedDecode.plan``.

        max_row_tokens: maximum tokens [T] of a row that share a page table, see ``FixedDecode``.
        """
        self._copied.synchronize()
        columns, starts, _ = views = _views(self._host_arrays, size)
        num_rows = len(tokens.positions)
        tables: Ints32 | None = None
        if num_rows > len(rows.requests) and max_row_tokens > 1:
            is_first = (tokens.positions - rows.starts[tokens.row_of_token]) % max_row_tokens == 0
            tables = np.append(np.flatnonzero(is_first), np.arange(num_rows, size + 1)).astype(np.int32)
        self._fill_tokens(columns[:, :num_rows], rows, sampled, tokens)
        if num_rows < size:
            columns[:, num_rows:] = self._padding
        self._fill_pages(views, tokens, tables)
        return starts, columns[LAST_LENGTHS], tables

    def _fill_tokens(self, columns: Ints32, rows: StepRows, sampled: SampledRows, tokens: TokenRows) -> None:
        """Write the columns [C, T] that do not depend on pages."""
        row_of_token, positions, row_indices = tokens.row_of_token, tokens.positions, tokens.row_indices
        columns[SOURCES], columns[TARGETS] = tokens.sources, tokens.targets
        columns[POSITIONS] = rows.shifted(positions, self._short_length, row_of_token)
        if (images := self._table.images) is not None:
            columns[POSITIONS] += images.deltas[row_indices]
        is_upper_bound = self._table.is_upper_bound
        columns[REJECTED] = np.where(is_upper_bound[row_indices], row_indices, len(is_upper_bound))
        fields = columns[FIELDS:TABLES]
        fill_fields(sampled, fields[:, : len(rows.requests)])
        if not isinstance(row_of_token, slice):
            fields[:] = fields[:, row_of_token]
        if not tokens.device_chooses_token:  # otherwise ``move_rows`` compares it with the positions
            columns[SAMPLED] = positions + 1 + self._lag

    def _fill_pages(self, views: Views[Ints32], tokens: TokenRows, tables: Ints32 | None) -> None:
        """Write slots, last lengths and page tables. tables: [X + 1] as in ``FixedDecode.plan``."""
        columns, starts, groups = views
        positions, page_size, size = tokens.positions, self._page_size, len(starts) - 1
        # the page table of each row, and the last row of each page table
        num_rows = num_tables = len(positions)
        table_of_row, lasts = np.arange(num_rows), slice(None)
        if tables is not None:
            num_tables = int(np.searchsorted(tables, num_rows))
            table_of_row = np.repeat(np.arange(num_tables), np.diff(tables[: num_tables + 1]))
            lasts = tables[1 : num_tables + 1] - 1
        last_positions = positions[lasts]
        last_pages = last_positions // page_size
        page_indices = np.arange(int(last_pages.max()) + 1)
        tables_GXP = self._table.page_tables.of_step(tokens.row_indices[lasts], last_positions, len(page_indices))
        columns[LAST_LENGTHS, :num_rows] = positions + 1 - last_pages[table_of_row] * page_size
        columns[TABLES, :num_rows] = -1 if tokens.device_chooses_token else table_of_row
        pages = positions // page_size
        slots_GT = (tables_GXP[:, table_of_row, pages] - pages) * page_size + positions
        # the used page ids, without shared pages, which are planned separately
        is_used_XP, counts = page_indices <= last_pages[:, np.newaxis], last_pages + 1
        if tokens.cascade is not None:
            is_used_XP &= page_indices >= tokens.cascade.num_shared[:, np.newaxis]
            counts -= tokens.cascade.num_shared
        starts[0] = 0
        np.cumsum(counts, out=starts[1 : num_tables + 1])
        num_used = int(starts[num_tables])
        num_page_ids = num_used + size - num_tables  # one for each padding row
        starts[num_tables + 1 :] = np.arange(num_used + 1, num_page_ids + 1)
        for group, (slots, page_ids) in enumerate(groups):
            slots[:num_rows], slots[num_rows:] = slots_GT[group], 0
            page_ids[:num_used], page_ids[num_used:num_page_ids] = tables_GXP[group][is_used_XP], PADDING_PAGE
            self._ends[group] = len(self._host_arrays[group]) - len(page_ids) + num_page_ids

    def copy(self) -> None:
        """Queue the copy of the filled step to the device."""
        for memory, host, end in zip(self._device, self._host, self._ends, strict=True):
            step = host[:end] if self._waits else self._table.upload(host[:end].numpy())
            memory[:end].copy_(step, non_blocking=True)
        if self._waits:
            self._copied.record()


def _views(memory: list[Array], size: int) -> Views[Array]:
    """Divide the memory [...] of each page group for a graph of ``size`` rows."""
    first, *others = memory
    end = NUM_COLUMNS * size
    columns = first[:end].reshape(NUM_COLUMNS, size)
    groups = [(columns[SLOTS], first[end + size + 1 :]), *((group[:size], group[size:]) for group in others)]
    return columns, first[end : end + size + 1], groups
