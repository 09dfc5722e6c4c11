"""SchedulerCore: the step. It has no I/O; a process loop, a test or a benchmark calls ``step``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from aioengine.scheduler.plan import Plan, StepResult

Ticket = TypeVar("Ticket")


class Runner(Protocol[Ticket]):
    """The device side of a step.

    Plans are launched in order and collected in the same order. A plan may be launched before an earlier one is
    collected: its decode rows then use tokens that only the device knows. Pages named by a plan are written in launch
    order, so pages freed after a launch may be given to a later plan.
    """

    def launch(self, plan: Plan) -> Ticket:
        """Begin the step; returns as early as the device allows."""
        ...

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for the step and give its tokens."""
        ...

    def close(self) -> None: ...
