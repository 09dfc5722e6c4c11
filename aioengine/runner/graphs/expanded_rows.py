"""Expand rows of several known tokens, for the graph of a decode step: each token becomes a row of the graph.

So rows with a few forced tokens are as fast as decode rows. A step with prompts takes the host several times as long to
launch. In each layer, all tokens write their keys and values before any of them attends.

R rows of a step, T their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.runner.inputs import StepRows
    from aioengine.runner.rows import RowTable
    from aioengine.runner.transfer import Ints


@dataclass(frozen=True, slots=True)
class ExpandedRows:
    """A step in which each token has its own row.

    Attributes:
        row_of_token: [T] the row of the step of each token.
        last_indices: [R] on the device, index in T of the last token of each row.
        positions: [T] position of each token.
        sources: [T] index of each token in ``RowTable.last_tokens``.
    """

    row_of_token: Ints
    last_indices: Tensor
    positions: Ints
    sources: Ints


def can_expand(rows: StepRows) -> bool:
    """Return whether all rows sample, and rows with known tokens are past their prompts."""
    known = np.flatnonzero(rows.num_known).tolist()
    return bool(rows.samples.all()) and all(rows.starts[row] >= rows.requests[row].num_prompt for row in known)


def expand_rows(rows: StepRows, table: RowTable) -> ExpandedRows:
    """Give each token of the step its own row. Writes the known tokens to the second half of the last tokens."""
    num_tokens, first = int(rows.token_ends[-1]), len(table.sampling)
    row_of_token = np.repeat(np.arange(len(rows.requests)), rows.counts)
    unknown_rows, unknown = rows.unknown_tokens()
    sources = np.empty(num_tokens, dtype=np.int64)
    sources[np.delete(np.arange(num_tokens), unknown)] = np.arange(first, first + len(rows.known_ids))
    sources[unknown] = rows.row_indices[unknown_rows]
    table.last_tokens[first : first + len(rows.known_ids)].copy_(table.upload(rows.known_ids))
    positions = np.arange(num_tokens) + (rows.starts + rows.counts - rows.token_ends)[row_of_token]
    return ExpandedRows(row_of_token, table.upload(rows.token_ends - 1), positions, sources)
