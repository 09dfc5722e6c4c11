"""Find the rows of a decode step that start with the same pages, and make them neighbors for cascade attention.

R rows of a step, P pages of the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from aioengine.attention._base import CascadeLimits, SharedPages
from aioengine.attention._shared_rows import num_common
from aioengine.kernels.arrays import Ints32, Ints64
from aioengine.runner.inputs import StepRows
from aioengine.runner.rows import RowTable

MAX_LEVELS = 32
"""Maximum depth of nested prefixes in the search."""


class CascadeGroup(NamedTuple):
    """Rows with the same first ``num_pages`` pages."""

    rows: Ints64
    num_pages: int

    @property
    def num_saved(self) -> int:
        """Number of page reads that the group saves."""
        return (len(self.rows) - 1) * self.num_pages


@dataclass(frozen=True, slots=True)
class Cascade:
    """A step with reordered rows: the rows of a group are adjacent.

    Attributes:
        order: [R] indices of the rows in the step.
        inverse: [R] on the device, the new index of each row of the step.
        num_shared: [R] number of shared pages of each row, in the new order.
        pages: the shared pages of all groups.
    """

    order: Ints64
    inverse: Tensor
    num_shared: Ints64
    pages: SharedPages


def find_groups(pages_RP: Ints32, num_full_R: Ints64, limits: CascadeLimits) -> list[CascadeGroup]:
    """Return the disjoint groups that save most, for page tables [R, P] with ``num_full_R`` [R] full pages."""
    groups = _find_groups(pages_RP, num_full_R, np.arange(len(pages_RP)), limits, levels=MAX_LEVELS)
    return sorted(groups, key=lambda group: group.num_saved, reverse=True)[: limits.max_groups]


def _find_groups(
    pages_RP: Ints32, num_full_R: Ints64, rows: Ints64, limits: CascadeLimits, *, levels: int
) -> list[CascadeGroup]:
    """Return all of ``rows`` [X] as one group, or smaller groups that share more pages, whichever saves more.

    pages_RP [R, P], num_full_R [R]: as in ``find_groups``.
    """
    if len(rows) < limits.min_rows or not levels:
        return []
    num_pages = num_common(pages_RP[rows, : int(num_full_R[rows].min())])
    one_group = CascadeGroup(rows, num_pages)
    groups = [one_group] if one_group.num_saved >= max(limits.min_saved, 1) else []
    longer = rows[num_full_R[rows] > num_pages]
    next_pages = pages_RP[longer, num_pages] if longer.size else longer
    ids, counts = np.unique(next_pages, return_counts=True)
    parts: list[CascadeGroup] = []
    for page in ids[counts >= limits.min_rows].tolist():
        parts += _find_groups(pages_RP, num_full_R, longer[next_pages == page], limits, levels=levels - 1)
    saved_by_parts = sum(group.num_saved for group in parts)
    return parts if saved_by_parts > sum(group.num_saved for group in groups) else groups


class SharedPrefixes:
    """Finds the cascade of decode steps. The search is repeated only when the rows change."""

    def __init__(self, table: RowTable, limits: CascadeLimits, *, page_size: int) -> None:
        self._table = table
        self._limits = limits
        self._page_size = page_size
        self._key: tuple[int, bytes] = (-1, b"")
        self._cascade: Cascade | None = None

    def find(self, rows: StepRows) -> Cascade | None:
        """Return the cascade of these rows; None: sharing saves too little."""
        key = (self._table.num_opened, rows.row_indices.tobytes())
        if key != self._key:
            num_full = rows.starts // self._page_size
            pages_RP = self._table.page_tables.tables[0][rows.row_indices, : int(num_full.max())]
            groups = find_groups(pages_RP, num_full, self._limits)
            self._key, self._cascade = key, _cascade(pages_RP, groups, self._table) if groups else None
        return self._cascade


def _cascade(pages_RP: Ints32, groups: list[CascadeGroup], table: RowTable) -> Cascade:
    """Reorder the rows of the step, with page tables [R, P], by group."""
    num_rows = len(pages_RP)
    sizes = [len(group.rows) for group in groups]
    num_pages = np.array([group.num_pages for group in groups], dtype=np.int32)
    grouped = np.concatenate([group.rows for group in groups])
    order = np.concatenate([grouped, np.setdiff1d(np.arange(num_rows), grouped)])
    inverse = np.empty(num_rows, dtype=np.int64)
    inverse[order] = np.arange(num_rows)
    num_shared = np.zeros(num_rows, dtype=np.int64)
    num_shared[: len(grouped)] = np.repeat(num_pages, sizes)
    page_ids = np.concatenate([pages_RP[group.rows[0], : group.num_pages] for group in groups])
    pages = SharedPages(np.cumsum(sizes).astype(np.int32), num_pages, page_ids)
    return Cascade(order, table.upload(inverse), num_shared, pages)
