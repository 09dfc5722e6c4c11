"""The token counts that penalties need on a GPU: how often each token occurs in each request.

The host never sees the last tokens of a request in time, so a token is counted when the next one is sampled: the
table of last tokens has it by then.

N rows of the table, W width of a row (every token that a prompt may have), X penalized rows of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.kernels.triton.penalties import IN_PROMPT, PenalizedRows, penalize

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from aioengine.runner.rows import RequestRow, RowTable, SampledRows

MORE_ROWS = 64
"""Rows by which the table grows; while it does, it is in memory twice."""


@dataclass(slots=True)
class _Place:
    """A row of the table: whose tokens it counts, and how many of them."""

    index: int
    request: RequestRow
    num_counted: int


class TokenCounts:
    """The tables of the penalized requests. A request takes over the counts of the last one that had its row index."""

    def __init__(self, table: RowTable, *, width: int, device: torch.device) -> None:
        self._table = table
        self._counts = torch.zeros(0, width, dtype=torch.int32, device=device)
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self._places: dict[int, _Place] = {}

    def apply(self, logits: Tensor, rows: SampledRows, users: npt.NDArray[np.int64], start: int) -> None:
        """Penalize ``users`` among the rows of the step from ``start`` on, whose logits [S, V] fp32 these are."""
        requests = [rows.requests[start + user] for user in users.tolist()]
        positions = rows.positions[start + users].tolist()
        places = [self._count(request) for request in requests]
        indices = np.array([place.index for place in places], dtype=np.int32)
        self._count_last(places, requests, positions, indices)
        upload = self._table.upload
        samplings = [request.sampling for request in requests]
        columns = PenalizedRows(
            upload(users.astype(np.int32)),
            upload(indices),
            upload(np.array([each.frequency_penalty for each in samplings], dtype=np.float32)),
            upload(np.array([each.presence_penalty for each in samplings], dtype=np.float32)),
            upload(np.array([each.repetition_penalty for each in samplings], dtype=np.float32)),
        )
        penalize(logits, self._counts, columns)

    def _count(self, request: RequestRow) -> _Place:
        """The request's row, which counts at least the tokens that it was opened with."""
        place = self._places.get(request.row_index)
        if place is not None and place.request is request:
            return place
        index = len(self._places) if place is None else place.index
        if index == len(self._counts):
            self._counts = torch.cat([self._counts, self._counts.new_zeros(MORE_ROWS, self._width)])
        place = _Place(index, request, len(request.token_ids))
        self._places[request.row_index] = place
        row = self._counts[index]
        row.zero_()
        ids = np.array(request.token_ids, dtype=np.int64)
        row.index_fill_(0, self._table.upload(ids[request.first_id : request.num_prompt]), IN_PROMPT)
        output = self._table.upload(ids[request.num_prompt :])
        row.index_add_(0, output, self._one.expand(len(output)))
        return place

    @property
    def _width(self) -> int:
        return self._counts.shape[1]

    def _count_last(
        self, places: list[_Place], requests: list[RequestRow], positions: list[int], indices: npt.NDArray[np.int32]
    ) -> None:
        """Count the tokens sampled one step before; ``positions`` [X]: of the new ones; ``indices`` [X]: of rows."""
        lags = np.array([position > place.num_counted for place, position in zip(places, positions, strict=True)])
        behind = np.flatnonzero(lags)
        if not behind.size:
            return
        for i in behind.tolist():
            places[i].num_counted += 1
        row_indices = np.array([requests[i].row_index for i in behind.tolist()], dtype=np.int64)
        tokens = self._table.last_tokens.index_select(0, self._table.upload(row_indices))
        flat = self._table.upload(indices[behind].astype(np.int64) * self._width) + tokens
        self._counts.view(-1).index_add_(0, flat, self._one.expand(len(flat)))
