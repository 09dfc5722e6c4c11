"""Ticket: a launched step."""

from __future__ import annotations

from dataclasses import dataclass, field

from aioengine.runner.hidden_states import StepHiddenStates
from aioengine.runner.logprobs import StepLogprobs
from aioengine.runner.pooler import PooledRows
from aioengine.runner.request_row import OpenConstraint, RequestRow
from aioengine.runner.speculation.step_drafts import StepDrafts
from aioengine.runner.transfer import Readback

ConstrainedToken = tuple[int, int, RequestRow, OpenConstraint]


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
        drafts: the drafts of the step; ``NO_DRAFTS`` of a plain step.
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
