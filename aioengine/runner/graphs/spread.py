"""Rows of several known tokens in the graph of a decode step: each token is a row of the graph.

So few tokens, as a grammar forces, take no longer than a decode step, where a step with prompts takes the host several
times as long to launch. In each layer all tokens write their keys and values before any of them attends.

R rows of a step, T their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from aioengine.runner.inputs import StepRows
    from aioengine.runner.rows import RowTable

    Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Spread:
    """A step whose tokens have a row each.

    Attributes:
        order: [T] the row of the step that each token belongs to.
        inverse: [R] on the device, the last token of each row.
        positions: [T] of the tokens.
        sources: [T] where the table of last tokens has them.
    """

    order: Ints
    inverse: Tensor
    positions: Ints
    sources: Ints


def can_spread(rows: StepRows) -> bool:
    """Whether rows that name their tokens are all behind their prompts, and each gives a token."""
    known = np.flatnonzero(rows.num_known).tolist()
    return bool(rows.samples.all()) and all(rows.starts[row] >= rows.requests[row].num_prompt for row in known)


def spread(rows: StepRows, table: RowTable) -> Spread:
    """Write the known tokens of a step behind those of the requests in the table, and give each token a row."""
    num_tokens, first = int(rows.token_ends[-1]), len(table.sampling)
    order = np.repeat(np.arange(len(rows.requests)), rows.counts)
    is_known = np.ones(num_tokens, dtype=np.bool_)
    held = np.flatnonzero(rows.num_known < rows.counts)
    is_known[rows.token_ends[held] - 1] = False
    sources = np.empty(num_tokens, dtype=np.int64)
    sources[~is_known] = rows.row_indices[held]
    sources[is_known] = np.arange(first, first + len(rows.known_ids))
    table.last_tokens[first : first + len(rows.known_ids)].copy_(table.upload(rows.known_ids))
    positions = np.arange(num_tokens) + (rows.starts + rows.counts - rows.token_ends)[order]
    return Spread(order, table.upload(rows.token_ends - 1), positions, sources)
