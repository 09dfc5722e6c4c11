"""Rearrange the rows of a decode step for a graph.

For cascade attention, rows that start with the same pages become neighbors. A row of several known tokens becomes
several rows of the graph, so that rows with a few forced tokens are as fast as decode rows. A step with prompts takes
the host several times as long to launch. In each layer, all tokens write their keys and values before any of them
attends.

R rows of a step, T their tokens, P pages of the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from aioengine.attention._base import CascadeLimits, SharedPages
from aioengine.attention._shared_rows import num_common
from aioengine.runner.inputs import StepRows
from aioengine.runner.rows import RowTable
from aioengine.runner.transfer import Ints

Pages = npt.NDArray[np.int32]


MAX_LEVELS = 32
"""Maximum depth of nested prefixes in the search."""


class CascadeGroup(NamedTuple):
    """Rows with the same first ``num_pages`` pages."""

    rows: Ints
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

    order: Ints
    inverse: Tensor
    num_shared: Ints
    pages: SharedPages


def find_groups(pages_RP: Pages, num_full_R: Ints, limits: CascadeLimits) -> list[CascadeGroup]:
    """Return the disjoint groups that save most, for page tables [R, P] with ``num_full_R`` [R] full pages."""
    all_rows = np.arange(len(pages_RP))
    if not len(all_rows):
        return []
    groups = _find_groups(pages_RP, num_full_R, all_rows, limits, levels=MAX_LEVELS)
    return sorted(groups, key=lambda group: group.num_saved, reverse=True)[: limits.max_groups]


def _find_groups(
    pages_RP: Pages, num_full_R: Ints, rows: Ints, limits: CascadeLimits, *, levels: int
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


def _cascade(pages_RP: Pages, groups: list[CascadeGroup], table: RowTable) -> Cascade:
    """Reorder the rows of the step, with page tables [R, P], by group."""
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


class TokenRows(NamedTuple):
    """The tokens of a step, each of which is a row of a graph, in the order of the graph.

    Attributes:
        row_of_token: [T] the row of the step of each token; slice(None): each row has one token, in the same order.
        positions: [T] position of each token.
        sources: [T] index of each token in ``RowTable.last_tokens``.
        targets: [T] index in ``RowTable.last_tokens`` of the token that is sampled after each token; -1: none.
        cascade: None if the graph has no cascade attention.
        is_exact: the positions are exact, and the device chooses the token of each row that counts (``move_rows``).
    """

    row_of_token: Ints | slice
    positions: Ints
    sources: Ints
    targets: Ints
    cascade: Cascade | None = None
    is_exact: bool = False


def can_expand(rows: StepRows) -> bool:
    """Return whether all rows sample, and rows with known tokens are past their prompts."""
    known = np.flatnonzero(rows.num_known).tolist()
    return bool(rows.samples.all()) and all(rows.starts[row] >= rows.requests[row].num_prompt for row in known)


def expand_rows(
    rows: StepRows, table: RowTable, num_drafts: Ints | None = None, num_unknown: Ints | None = None
) -> TokenRows:
    """Give each token of the step its own row, without targets. Copies the known tokens to ``RowTable.last_tokens``.

    The last tokens of a row may be only on the device (``RowTable.draft_indices``): its drafts, or for a draft model
    the tokens that the step in flight samples.

    num_drafts: [R] the number of these drafts; None: the host knows all drafts.
    num_unknown: [R] the number of tokens that the step in flight may sample; None: the host knows its tokens.
    """
    num_tokens, first = int(rows.token_ends[-1]), len(table.sampling)
    row_of_token = np.repeat(np.arange(len(rows.requests)), rows.counts)
    unknown_rows, unknown = rows.unknown_tokens()
    sources = np.empty(num_tokens, dtype=np.int64)
    sources[np.delete(np.arange(num_tokens), unknown)] = np.arange(first, first + len(rows.known_ids))
    sources[unknown] = rows.row_indices[unknown_rows]
    table.last_tokens[first : first + len(rows.known_ids)].copy_(table.upload(rows.known_ids))
    on_device = num_drafts if num_unknown is None else num_unknown
    if on_device is not None:
        row_of_last = np.repeat(np.arange(len(on_device)), on_device)
        numbers = np.arange(len(row_of_last)) - (on_device.cumsum() - on_device)[row_of_last]
        lasts = (rows.token_ends - on_device)[row_of_last] + numbers
        if num_unknown is not None:
            numbers = -1 - numbers
        sources[lasts] = table.draft_indices(numbers, rows.row_indices[row_of_last])
    if num_unknown is None:  # otherwise ``num_unknown`` has this token, too
        is_unread = table.is_unread[rows.row_indices]  # only the device has the first token
        sources[(rows.token_ends - rows.counts)[is_unread]] = rows.row_indices[is_unread]
    positions = np.arange(num_tokens) + (rows.starts + rows.counts - rows.token_ends)[row_of_token]
    return TokenRows(row_of_token, positions, sources, np.full(num_tokens, -1), is_exact=num_unknown is not None)
