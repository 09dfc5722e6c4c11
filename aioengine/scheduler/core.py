"""SchedulerCore: the step. It has no I/O; a process loop, a test or a benchmark calls ``step``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aioengine.config import Settings
    from aioengine.protocol.messages import Progress
    from aioengine.scheduler.plan import Plan, StepResult

Ticket = TypeVar("Ticket")


class Runner(Protocol[Ticket]):
    """The device side of a step.

    Plans are launched in order and collected in the same order. A plan may be launched before an earlier one is
    collected: its decode rows then use tokens that only the device knows. Pages named by a plan are written in launch
    order, so pages freed after a launch may be given to a later plan.
    """

    @property
    def facts(self) -> Mapping[str, str | int | float | bool]:
        """What it runs on, as ``Ready`` tells it; ``num_pages`` (an int) is the pool that the scheduler may use."""
        ...

    def launch(self, plan: Plan) -> Ticket:
        """Begin the step; returns as early as the device allows."""
        ...

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for the step and give its tokens."""
        ...

    def close(self) -> None: ...


class RunnerFactory(Protocol):
    """What ``settings.runner.factory`` names: builds the runner, telling of long work through ``report``."""

    def __call__(self, settings: Settings, report: Callable[[Progress], None], /) -> Runner[Any]: ...
