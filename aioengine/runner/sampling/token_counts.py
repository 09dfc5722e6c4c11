"""Token counts of requests on a GPU, for penalties.

The host does not know the last token of a request in time. So a token is counted when the next token is sampled: then
the table of last tokens contains it.

N rows of the count table, W width of a row (all tokens that a prompt may have), X penalized rows of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.kernels.triton.logits import IN_PROMPT, PenalizedRows, penalize

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from aioengine.protocol.messages import Sampling
    from aioengine.runner.request_row import LogitsRow, RequestRow
    from aioengine.runner.rows import RowTable
    from aioengine.runner.transfer import Upload

MORE_ROWS = 64
"""Rows by which the table grows. While it grows, it needs twice its memory."""


@dataclass(slots=True)
class _CountRow:
    """A row of the count table, its request, and the number of counted tokens."""

    index: int
    request: RequestRow
    num_counted: int


class TokenCounts:
    """The logits processor of penalties on a GPU. In its count table, a request reuses the row of the previous request
    with its row index.
    """

    def __init__(self, table: RowTable, *, width: int) -> None:
        device = table.last_tokens.device
        self._table = table
        self._width = width
        self._counts = torch.zeros(0, width, dtype=torch.int32, device=device)
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self._rows: dict[int, _CountRow] = {}

    def wants(self, sampling: Sampling) -> bool:
        return sampling.has_penalties

    def apply(self, logits: Tensor, rows: list[LogitsRow], upload: Upload) -> None:
        """Penalize ``rows`` of logits [S, V] fp32."""
        count_rows = [self._count(row.request) for row in rows]
        indices = np.array([row.index for row in count_rows], dtype=np.int32)
        self._count_last(count_rows, [row.num_tokens for row in rows], indices)
        samplings = [row.request.sampling for row in rows]
        columns = PenalizedRows(
            upload(np.array([row.index for row in rows], dtype=np.int32)),
            upload(indices),
            upload(np.array([sampling.frequency_penalty for sampling in samplings], dtype=np.float32)),
            upload(np.array([sampling.presence_penalty for sampling in samplings], dtype=np.float32)),
            upload(np.array([sampling.repetition_penalty for sampling in samplings], dtype=np.float32)),
        )
        penalize(logits, self._counts, columns)

    def _count(self, request: RequestRow) -> _CountRow:
        """Return the request's count row. If it is new, count the tokens with which the request was opened."""
        row = self._rows.get(request.row_index)
        if row is not None and row.request is request:
            return row
        index = len(self._rows) if row is None else row.index
        if index == len(self._counts):
            self._counts = torch.cat([self._counts, self._counts.new_zeros(MORE_ROWS, self._width)])
        row = self._rows[request.row_index] = _CountRow(index, request, len(request.token_ids))
        counts = self._counts[index]
        counts.zero_()
        ids = np.array(request.token_ids, dtype=np.int64)
        counts.index_fill_(0, self._table.upload(ids[request.first_id : request.num_prompt]), IN_PROMPT)
        output = self._table.upload(ids[request.num_prompt :])
        counts.index_add_(0, output, self._one.expand(len(output)))
        return row

    def _count_last(self, rows: list[_CountRow], positions: list[int], indices: npt.NDArray[np.int32]) -> None:
        """Count the tokens sampled in the previous step. positions [X]: of new tokens. indices [X]: of rows."""
        uncounted = [i for i, row in enumerate(rows) if positions[i] > row.num_counted]
        if not uncounted:
            return
        for i in uncounted:
            rows[i].num_counted += 1
        row_indices = np.array([rows[i].request.row_index for i in uncounted], dtype=np.int64)
        tokens = self._table.last_tokens.index_select(0, self._table.upload(row_indices))
        flat = self._table.upload(indices[uncounted].astype(np.int64) * self._width) + tokens
        self._counts.view(-1).index_add_(0, flat, self._one.expand(len(flat)))
