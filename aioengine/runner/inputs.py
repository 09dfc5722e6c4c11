"""From the rows of a plan to the tensors of a step, in whole columns.

Shape letters: T packed tokens of the step, R rows, P pages of the longest row, S rows that sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.attention._base import ForwardBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from aioengine.runner.rows import RequestRow, RowTable
    from aioengine.scheduler.plan import Row

    Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step as columns of length R, and the tokens that the plan names, one after the other.

    num_known: tokens that the plan names of a row: ``counts``, or one less where only the device knows the last.
    """

    requests: list[RequestRow]
    slots: Ints
    starts: Ints
    counts: Ints
    samples: npt.NDArray[np.bool_]
    num_known: Ints
    known_ids: Ints

    @property
    def sampled_requests(self) -> list[RequestRow]:
        return [request for request, samples in zip(self.requests, self.samples.tolist(), strict=True) if samples]

    @property
    def sampled_positions(self) -> Ints:
        """Where the new tokens go in their requests, [S]."""
        return (self.starts + self.counts)[self.samples]


class InputBuilder:
    """Makes the batch of a step. Token ids must be below ``num_embeddings``."""

    def __init__(self, table: RowTable, *, page_size: int, num_embeddings: int) -> None:
        self._table = table
        self._page_size = page_size
        self._num_embeddings = num_embeddings

    def read(self, rows: list[Row]) -> StepRows:
        """The columns of these rows, whose requests must be open."""
        requests = [self._table.requests[row.uid] for row in rows]
        num_known = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
        return StepRows(
            requests,
            np.array([request.slot for request in requests], dtype=np.int64),
            np.array([row.start for row in rows], dtype=np.int64),
            np.array([row.count for row in rows], dtype=np.int64),
            np.array([row.samples for row in rows], dtype=np.bool_),
            num_known,
            np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, int(num_known.sum())),
        )

    def is_valid(self, rows: StepRows) -> bool:
        """Whether all rows can be computed; ``find_errors`` says which cannot."""
        missing = rows.counts - rows.num_known
        ends = rows.starts + rows.counts
        room = self._table.num_pages[rows.slots] * self._page_size
        are_rows_valid = (rows.counts > 0) & (rows.starts >= 0) & (missing >= 0) & (missing <= 1) & (ends <= room)
        ids = rows.known_ids
        return bool(are_rows_valid.all()) and not (ids.size and (ids.min() < 0 or ids.max() >= self._num_embeddings))

    def find_errors(self, rows: list[Row]) -> dict[int, str]:
        """What is wrong with each row that cannot be computed, by uid."""
        errors = {row.uid: self._find_error(row) for row in rows}
        return {uid: error for uid, error in errors.items() if error}

    def _find_error(self, row: Row) -> str:
        request = self._table.requests.get(row.uid)
        if request is None:
            return "the runner does not know this request"
        if row.start < 0 or row.count < 1 or not 0 <= row.count - len(row.token_ids) <= 1:
            return f"{len(row.token_ids)} token ids for {row.count} positions from {row.start} on"
        room = int(self._table.num_pages[request.slot]) * self._page_size
        if row.start + row.count > room:
            return f"positions up to {row.start + row.count}, but its pages hold {room}"
        wrong = [i for i in row.token_ids if not 0 <= i < self._num_embeddings]
        return f"token id {wrong[0]} is outside the vocabulary of {self._num_embeddings}" if wrong else ""

    def build(self, rows: StepRows) -> ForwardBatch:
        """The tensors of valid rows, at least one."""
        ends = rows.counts.cumsum()
        kv_lengths = rows.starts + rows.counts
        num_pages = -(-int(kv_lengths.max()) // self._page_size)
        page_table_RP = self._table.page_table[rows.slots, :num_pages]
        if ends[-1] == len(ends):
            row_of_token, positions = np.arange(len(ends)), rows.starts
        else:
            row_of_token = np.repeat(np.arange(len(ends)), rows.counts)
            positions = np.arange(ends[-1]) + np.repeat(kv_lengths - ends, rows.counts)
        pages = page_table_RP[row_of_token, positions // self._page_size].astype(np.int64)
        return ForwardBatch(
            input_ids=self._input_ids(rows, ends),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(pages * self._page_size + positions % self._page_size),
            page_table=self._tensor(page_table_RP),
            query_lengths=rows.counts.tolist(),
            kv_lengths=kv_lengths.tolist(),
            sample_rows=self._tensor(ends[rows.samples] - 1),
        )

    def _input_ids(self, rows: StepRows, ends: Ints) -> Tensor:
        held = np.flatnonzero(rows.num_known < rows.counts)  # rows whose last token the device holds
        if not held.size:
            return self._tensor(rows.known_ids)
        held_ids = self._table.last_tokens[self._tensor(rows.slots[held])]
        if not rows.known_ids.size:
            return held_ids  # decode rows alone
        is_known = np.ones(ends[-1], dtype=np.bool_)
        is_known[ends[held] - 1] = False
        ids = np.zeros(ends[-1], dtype=np.int64)
        ids[is_known] = rows.known_ids
        input_ids = self._tensor(ids)
        input_ids[self._tensor(ends[held] - 1)] = held_ids
        return input_ids

    def _tensor(self, column: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(column).to(self._table.last_tokens.device)
