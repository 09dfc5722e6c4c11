"""The drafts of a step, from its plan to its result.

R rows of the step, K drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from aioengine.kernels.arrays import Ints64
from aioengine.runner.inputs import StepRows
from aioengine.runner.request_row import RequestRow, SampledRows
from aioengine.runner.speculation.draft_model import DeviceDrafts, DraftedRequest
from aioengine.scheduler.plan import Row


@dataclass(slots=True)
class StepDrafts:
    """The drafts of a step. The attributes are set in this order, up to ``rows`` before the launch.

    Attributes:
        planned: uid -> number of planned drafts.
        proposed: uid -> proposed drafts; zeros while they are only on the device.
        on_device: the proposed drafts on the device; None: the host knows them.
        rows: the computed rows, with exact starts, and with the proposed drafts as known tokens. Other ranks get them.
        accepts_on_device: the device accepts drafts, and stores the number of rejected ones in ``RowTable.rejected``.
        accepted: uid -> accepted drafts, after the verification.
        followed: indices of sampled rows whose grammar has followed the last token of the row.
        drafted: the open request of each sampled row; None on ranks above 0.
        rejected: uid -> number of rejected drafts.
    """

    planned: dict[int, int] = field(default_factory=dict[int, int])
    proposed: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    on_device: DeviceDrafts | None = None
    rows: list[Row] = field(default_factory=list[Row])
    accepts_on_device: bool = False
    accepted: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    followed: set[int] = field(default_factory=set[int])
    drafted: list[DraftedRequest | None] = field(default_factory=list[DraftedRequest | None])
    rejected: dict[int, int] = field(default_factory=dict[int, int])

    def of_requests(self, requests: list[RequestRow]) -> list[list[int]]:
        """Return the proposed drafts of each request [R]."""
        return [self.proposed.get(request.uid, []) for request in requests]

    def counts(self, requests: list[RequestRow]) -> Ints64:
        """Return the number of proposed drafts of each request [R]."""
        return np.array([*map(len, self.of_requests(requests))], dtype=np.int64)

    def token_indices(self, rows: StepRows) -> Ints64:
        """Return the indices [K] in the step of the tokens before each draft, row by row."""
        counts = self.counts(rows.requests)
        firsts = rows.token_ends - 1 - counts
        return np.concatenate(
            [np.arange(first, first + count) for first, count in zip(firsts.tolist(), counts.tolist(), strict=True)]
        )

    def after_accepted(self, rows: SampledRows) -> SampledRows:
        """Return these rows, at their positions after the accepted drafts."""
        if not self.accepted:
            return rows
        counts = np.array([len(self.accepted[request.uid]) for request in rows.requests], dtype=np.int64)
        return replace(rows, positions=rows.positions + counts)

    def read(self, token_ids: list[int] | None = None) -> None:
        """Set the drafts that are only on the device. token_ids: these drafts [K]; None: wait for them."""
        if (on_device := self.on_device) is not None:
            self.proposed = on_device.by_request(token_ids or on_device.token_ids.tolist())
            self.on_device = None


NO_DRAFTS = StepDrafts()
"""The drafts of all steps that are computed as in an engine without drafts. Never changed."""
