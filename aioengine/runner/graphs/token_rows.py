"""The rows of a decode graph: one for each token of a step, and where the device reads and stores these tokens.

Usually a row of the step has one token. A row of several known tokens (forced tokens, drafts) becomes several rows of
the graph, so that it is as fast as decode rows: a step with prompts takes the host several times as long to launch. In
each layer, all tokens write their keys and values before any of them attends.

Tokens stay on the device between steps. A graph reads the token of each row in ``RowTable.last_tokens`` at its source,
and stores the sampled token there at its target. So usually source and target are the row index of the request. Known
tokens of a step with several tokens per row are copied behind the last tokens of all requests. Drafts, and the tokens
that a step with drafts samples, have places of their own (``RowTable.draft_indices``).

R rows of a step, T their tokens, X tokens at the ends of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from aioengine.kernels.arrays import Ints64
from aioengine.runner.graphs.shared_prefixes import Cascade
from aioengine.runner.inputs import StepRows
from aioengine.runner.rows import RowTable


class TokenRows(NamedTuple):
    """The rows of a graph, without padding.

    Attributes:
        row_of_token: [T] the row of the step of each token; slice(None): each row has one token, in the same order.
        row_indices: [T] row index of its request.
        positions: [T] position of each token.
        sources: [T] index of each token in ``RowTable.last_tokens``.
        targets: [T] index in ``RowTable.last_tokens`` of the token that is sampled after each token; -1: none.
        cascade: None if the graph has no cascade attention.
        device_chooses_token: a draft model computes all tokens that the step in flight may sample, at exact positions.
            Only the device knows which of them count. It samples after the last one (``move_rows``).
    """

    row_of_token: Ints64 | slice
    row_indices: Ints64
    positions: Ints64
    sources: Ints64
    targets: Ints64
    cascade: Cascade | None = None
    device_chooses_token: bool = False


def can_expand(rows: StepRows) -> bool:
    """Return whether all rows sample, and rows with known tokens are past their prompts."""
    known = np.flatnonzero(rows.num_known).tolist()
    return bool(rows.samples.all()) and all(rows.starts[row] >= rows.requests[row].num_prompt for row in known)


def expand_rows(
    rows: StepRows, table: RowTable, num_drafts: Ints64 | None = None, num_unknown: Ints64 | None = None
) -> TokenRows:
    """Give each token of the step its own row, without targets. Copies the known tokens to ``RowTable.last_tokens``.

    num_drafts: [R] how many last tokens of each row are drafts that only the device has; None: the host knows them.
    num_unknown: [R] for a draft model, how many last tokens of each row the step in flight may sample; None: the host
    knows its tokens.
    """
    num_tokens, first = int(rows.token_ends[-1]), len(table.sampling)
    row_of_token = np.repeat(np.arange(len(rows.requests)), rows.counts)
    positions = np.arange(num_tokens) + (rows.starts + rows.counts - rows.token_ends)[row_of_token]
    unknown_rows, unknown = rows.unknown_tokens()
    known = slice(first, first + len(rows.known_ids))
    table.last_tokens[known].copy_(table.upload(rows.known_ids))
    sources = np.empty(num_tokens, dtype=np.int64)
    sources[np.delete(np.arange(num_tokens), unknown)] = np.arange(known.start, known.stop)
    sources[unknown] = rows.row_indices[unknown_rows]
    if num_unknown is not None:
        lasts, row_indices, numbers = _last_tokens(rows, num_unknown)
        sources[lasts] = table.draft_indices(-1 - numbers, row_indices)
    else:
        if num_drafts is not None:
            lasts, row_indices, numbers = _last_tokens(rows, num_drafts)
            sources[lasts] = table.draft_indices(numbers, row_indices)
        is_unread = table.is_unread[rows.row_indices]  # only the device has the first token
        sources[(rows.token_ends - rows.counts)[is_unread]] = rows.row_indices[is_unread]
    all_indices, targets = rows.row_indices[row_of_token], np.full(num_tokens, -1)
    has_unknown = num_unknown is not None
    return TokenRows(row_of_token, all_indices, positions, sources, targets, device_chooses_token=has_unknown)


def _last_tokens(rows: StepRows, counts: Ints64) -> tuple[Ints64, Ints64, Ints64]:
    """Return the last ``counts`` [R] tokens of each row: [X] their indices in the step, the row indices of their
    requests, and their numbers within the row, from 0 on.
    """
    row_of_last = np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(len(row_of_last)) - (counts.cumsum() - counts)[row_of_last]
    return (rows.token_ends - counts)[row_of_last] + numbers, rows.row_indices[row_of_last], numbers
