"""A scheduler that checks the results of its runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from aioengine.protocol.messages import StepOutput
    from aioengine.scheduler.plan import StepResult


class CheckedScheduler(Scheduler):
    """Checks that each result has one entry for each row with outputs, in the order of the plan."""

    def apply(self, result: StepResult, now: float) -> StepOutput:
        plan = self._flights[0].plan
        assert result.tokens.uids == [row.uid for row in plan.rows if row.outputs]
        return super().apply(result, now)
