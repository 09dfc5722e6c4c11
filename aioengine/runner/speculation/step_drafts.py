"""The drafts of a step: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from aioengine.runner.inputs import StepRows
    from aioengine.runner.request_row import RequestRow
    from aioengine.runner.speculation.ngram import NgramProposer
    from aioengine.runner.transfer import Ints


@dataclass(slots=True)
class OpenDrafts:
    """An open request.

    Attributes:
        proposer: None: it gets no proposals.
        num_rejected: drafts rejected in flight, which the scheduler does not know yet.
    """

    proposer: NgramProposer | None
    num_rejected: int = 0


@dataclass(slots=True)
class StepDrafts:
    """The drafts of a step.

    Attributes:
        planned: uid -> planned drafts. proposed: uid -> proposed drafts.
        accepted: uid -> accepted drafts, after the verification.
        followed: indices of sampled rows whose grammar has followed the last token of the row.
        open: the open requests of the sampled rows.
        rejected: uid -> number of rejected drafts.
    """

    planned: dict[int, int] = field(default_factory=dict[int, int])
    proposed: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    accepted: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    followed: set[int] = field(default_factory=set[int])
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
