"""Ticket: a launched step, with its drafts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from aioengine.runner.hidden_states import StepHiddenStates
from aioengine.runner.inputs import StepRows
from aioengine.runner.logprobs import StepLogprobs
from aioengine.runner.pooler import PooledRows
from aioengine.runner.request_row import OpenConstraint, RequestRow
from aioengine.runner.speculation.draft_model import DraftedRequest, ProposedDrafts
from aioengine.runner.transfer import Ints, Readback

ConstrainedToken = tuple[int, int, RequestRow, OpenConstraint]


@dataclass(slots=True)
class OpenDrafts:
    """The drafts of an open request.

    Attributes:
        drafted: its known tokens, for the draft model; None: the draft model proposes none for it.
        num_rejected: drafts rejected in flight, which the scheduler does not know yet.
    """

    drafted: DraftedRequest | None
    num_rejected: int = 0


@dataclass(slots=True)
class StepDrafts:
    """The drafts of a step.

    Attributes:
        planned: uid -> planned drafts. proposed: uid -> proposed drafts; zeros while they are only on the device.
        on_device: the proposed drafts on the device; None: the host knows them.
        accepted: uid -> accepted drafts, after the verification.
        followed: indices of sampled rows whose grammar has followed the last token of the row.
        is_counted: the device has accepted drafts, and ``RowTable.rejected`` has the number of the others.
        open: the open requests of the sampled rows.
        rejected: uid -> number of rejected drafts.
    """

    planned: dict[int, int] = field(default_factory=dict[int, int])
    proposed: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    on_device: ProposedDrafts | None = None
    accepted: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    followed: set[int] = field(default_factory=set[int])
    is_counted: bool = False
    open: list[OpenDrafts | None] = field(default_factory=list["OpenDrafts | None"])
    rejected: dict[int, int] = field(default_factory=dict[int, int])

    def counts(self, requests: list[RequestRow]) -> Ints:
        """Return the number of proposed drafts of each request [R]."""
        return np.array([len(self.proposed.get(request.uid, ())) for request in requests], dtype=np.int64)

    def token_indices(self, rows: StepRows) -> Ints:
        """Return the indices [K] in the step of the tokens before each draft, row by row."""
        counts = self.counts(rows.requests)
        firsts = rows.token_ends - 1 - counts
        return np.concatenate(
            [np.arange(first, first + count) for first, count in zip(firsts.tolist(), counts.tolist(), strict=True)]
        )


NO_DRAFTS = StepDrafts()


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A launched step.

    Attributes:
        with_outputs: uids of the rows with outputs (``Row.outputs``), in the order of the plan.
        sampled: uids of the computed rows that sample. without_token: uids of the other computed rows.
        values: a token or FAILED for each of ``sampled``, then 0 or FAILED (not finite) for each of ``without_token``.
        failed: uid -> error of rows that were not computed, or whose grammar cannot be followed.
        logprobs, hidden_states, pooled: requested logprobs, hidden states and vectors; None: there are none.
        constrained: index in ``sampled``, position, request and constraint of each token to follow.
        repeated: uids of the rows whose token was already returned as a forced token.
        forced: uid -> tokens that the grammar forces after the sampled token.
        complete: uids of the rows whose grammar is complete.
        drafts: the drafts of the step; ``NO_DRAFTS`` if the engine does not speculate.
    """

    with_outputs: list[int]
    sampled: list[int]
    without_token: list[int]
    values: Readback
    failed: dict[int, str]
    logprobs: StepLogprobs | None = None
    hidden_states: StepHiddenStates | None = None
    pooled: PooledRows | None = None
    constrained: list[ConstrainedToken] = field(default_factory=list["ConstrainedToken"])
    repeated: set[int] = field(default_factory=set[int])
    forced: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    complete: list[int] = field(default_factory=list[int])
    drafts: StepDrafts = field(kw_only=True)
