"""Cascade attention: which rows of a decode step start with the same pages, to which attention is computed once.

R rows, P pages of the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aioengine.attention._base import SharedPages
from aioengine.attention._shared_rows import num_common

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from aioengine.attention._base import CascadeLimits
    from aioengine.runner.inputs import StepRows
    from aioengine.runner.rows import RowTable

    Ints = npt.NDArray[np.int64]
    Pages = npt.NDArray[np.int32]


MAX_LEVELS = 32
"""Prefixes of prefixes that are searched."""


class Group(NamedTuple):
    """Rows whose first ``num_pages`` pages are the same."""

    rows: Ints
    num_pages: int

    @property
    def num_spared(self) -> int:
        """Page reads that the group saves."""
        return (len(self.rows) - 1) * self.num_pages


@dataclass(frozen=True, slots=True)
class Cascade:
    """A step whose rows are in another order, those of a group together.

    Attributes:
        order: [R] indices into the rows of the step.
        inverse: [R] on the device, the new index of each row of the step.
        num_shared: [R] shared pages of each row, in the new order.
        pages: the shared pages of all groups.
    """

    order: Ints
    inverse: Tensor
    num_shared: Ints
    pages: SharedPages


def find_groups(pages_RP: Pages, num_full_R: Ints, worth: CascadeLimits) -> list[Group]:
    """The disjoint groups that save most, for page tables [R, P] of which ``num_full_R`` [R] pages are full."""
    every_row = np.arange(len(pages_RP))
    if not len(every_row):
        return []
    found = _groups_of(pages_RP, num_full_R, every_row, worth, levels=MAX_LEVELS)
    return sorted(found, key=lambda group: group.num_spared, reverse=True)[: worth.max_groups]


def _groups_of(pages_RP: Pages, num_full_R: Ints, rows: Ints, worth: CascadeLimits, *, levels: int) -> list[Group]:
    """Either all of ``rows`` [X] as one group, or groups of those that share further pages, whichever saves more.

    pages_RP [R, P], num_full_R [R]: as in ``find_groups``.
    """
    if len(rows) < worth.min_rows or not levels:
        return []
    num_pages = num_common(pages_RP[rows, : int(num_full_R[rows].min())])
    whole = Group(rows, num_pages)
    groups = [whole] if whole.num_spared >= max(worth.min_saved, 1) else []
    longer = rows[num_full_R[rows] > num_pages]
    next_pages = pages_RP[longer, num_pages] if longer.size else longer
    ids, counts = np.unique(next_pages, return_counts=True)
    parts: list[Group] = []
    for page in ids[counts >= worth.min_rows].tolist():
        parts += _groups_of(pages_RP, num_full_R, longer[next_pages == page], worth, levels=levels - 1)
    spared_by_parts = sum(group.num_spared for group in parts)
    return parts if spared_by_parts > sum(group.num_spared for group in groups) else groups


class SharedPrefixes:
    """Finds the cascade of decode steps, once for as long as their rows stay the same."""

    def __init__(self, table: RowTable, worth: CascadeLimits, *, page_size: int) -> None:
        self._table = table
        self._worth = worth
        self._page_size = page_size
        self._seen: tuple[int, bytes] = (-1, b"")
        self._cascade: Cascade | None = None

    def find(self, rows: StepRows) -> Cascade | None:
        """The cascade of these rows; None where sharing saves too little."""
        seen = (self._table.num_opened, rows.row_indices.tobytes())
        if seen != self._seen:
            self._seen, self._cascade = seen, self._look(rows)
        return self._cascade

    def _look(self, rows: StepRows) -> Cascade | None:
        num_rows = len(rows.row_indices)
        if num_rows < self._worth.min_rows:
            return None
        num_full = rows.starts // self._page_size
        pages_RP = self._table.page_table[rows.row_indices, : int(num_full.max())]
        groups = find_groups(pages_RP, num_full, self._worth)
        if not groups:
            return None
        return _cascade(pages_RP, groups, self._table)


def _cascade(pages_RP: Pages, groups: list[Group], table: RowTable) -> Cascade:
    """The order of the step's rows and their shared pages, from page tables [R, P]."""
    num_rows = len(pages_RP)
    grouped = np.concatenate([group.rows for group in groups])
    order = np.concatenate([grouped, np.setdiff1d(np.arange(num_rows), grouped)])
    inverse = np.empty(num_rows, dtype=np.int64)
    inverse[order] = np.arange(num_rows)
    num_shared = np.zeros(num_rows, dtype=np.int64)
    num_shared[: len(grouped)] = np.repeat([group.num_pages for group in groups], [len(group.rows) for group in groups])
    pages = SharedPages(
        row_ends=np.cumsum([len(group.rows) for group in groups]).astype(np.int32),
        num_pages=np.array([group.num_pages for group in groups], dtype=np.int32),
        page_ids=np.concatenate([pages_RP[group.rows[0], : group.num_pages] for group in groups]),
    )
    return Cascade(order, table.upload(inverse), num_shared, pages)
