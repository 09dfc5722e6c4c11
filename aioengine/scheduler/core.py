"""SchedulerCore: the step. It has no I/O; a process loop, a test or a benchmark calls ``step``."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from aioengine.errors import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from aioengine.config import Settings
    from aioengine.protocol.messages import Control, Progress, Reply, StepOutput
    from aioengine.scheduler.plan import Plan, StepResult
    from aioengine.scheduler.scheduler import Scheduler

Ticket = TypeVar("Ticket")

MAX_FAILURES = 3  # failed steps in a row; then the runner counts as broken


class Runner(Protocol[Ticket]):
    """The device side of a step.

    Plans are launched in order and collected in the same order. A plan may be launched before an earlier one is
    collected: its decode rows then use tokens that only the device knows. Pages named by a plan are written in launch
    order, so pages freed after a launch may be given to a later plan. A plan may close a uid that the runner does not
    know (its launch had failed), or one whose row is still in flight.
    """

    @property
    def facts(self) -> Mapping[str, str | int | float | bool]:
        """What it runs on, for ``Ready``; ``num_pages`` (an int) is the size of the pool that the scheduler may use."""
        ...

    def launch(self, plan: Plan) -> Ticket:
        """Begin the step; returns as early as the device allows."""
        ...

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for the end of the step."""
        ...

    def control(self, order: Control) -> Reply:
        """Carry out an order that is no step, such as to load weights or an adapter, or to free memory.

        Called between steps: every launched plan has been collected. The reply has the ``call_id`` of the order. An
        order can come a second time, when the detokenizer process was replaced before the reply arrived.

        Raises:
            UnknownOrderError: the runner does not implement it.
            Exception: the order failed. This is its answer; requests go on, so the runner must be as it was before.
        """
        ...

    def close(self) -> None: ...


class Trace(Protocol):
    """Records the parts of a step for a profile, while one is recorded."""

    def part(self, name: str) -> AbstractContextManager[object]:
        """A range named ``name``."""
        ...

    def launch(self, number: int, plan: Plan) -> AbstractContextManager[object]:
        """The range in which the runner launches ``plan``, the step of this number (from 1)."""
        ...


class NoTrace:
    """Does nothing without a profiler."""

    _nothing = nullcontext()

    def part(self, name: str) -> AbstractContextManager[object]:
        return self._nothing

    def launch(self, number: int, plan: Plan) -> AbstractContextManager[object]:
        return self._nothing


class RunnerFactory(Protocol):
    """The function that ``settings.runner.factory`` names: builds the runner and reports long work to ``report``."""

    def __call__(self, settings: Settings, report: Callable[[Progress], None], /) -> Runner[Any]: ...


class SchedulerCore(Generic[Ticket]):
    """Scheduler and runner together: each ``step`` plans, launches, and collects the step that is due.

    Attributes:
        scheduler: chooses the steps. requests: its requests; submit, abort and hold them here, between two steps.
        is_paused: while True no step is launched; what is in flight is collected, deadlines and aborts still act.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner[Ticket],
        depth: int,
        *,
        clock: Callable[[], float] | None = None,
        trace: Trace | None = None,
    ) -> None:
        """``depth``: how many steps may be in flight beside the one just launched. 0 waits for each step before it
        plans the next; 1 plans and launches the next while the device computes. ``clock``: dates what is collected;
        without it that is the ``now`` of the step, which is too early by the wait. ``trace``: marks the parts of each
        step.
        """
        if depth < 0:
            raise ValueError(f"depth must be 0 or more, not {depth}")
        self.scheduler = scheduler
        self.requests = scheduler.requests
        self._runner = runner
        self._depth = depth
        self._clock = clock
        self._trace: Trace = NoTrace() if trace is None else trace
        self._in_flight: deque[tuple[Plan, Ticket]] = deque()
        self._calls_between_steps: list[Callable[[], None]] = []
        self._num_launched = 0
        self._num_failures = 0
        self.is_paused = False

    def step(self, now: float) -> StepOutput | None:
        """One pass: plan, launch, collect what is due, apply. None: there is nothing to report.

        Raises the runner's exception when it has failed ``MAX_FAILURES`` times in a row.
        """
        if self._calls_between_steps and not self._in_flight:
            self._run_calls_between_steps()
        plan = self._plan(now)
        if plan is not None:
            self._launch(plan)
        is_due = len(self._in_flight) > self._depth or plan is None
        output = self._collect(now) if is_due and self._in_flight else None
        if output is None and self.requests.outbox.has_events:
            output = self.requests.outbox.take()
        return output

    @property
    def has_work(self) -> bool:
        """Whether calling ``step`` now does anything. False: nothing to do before a message or the next deadline."""
        if self._in_flight or self.requests.outbox.has_events or self._calls_between_steps:
            return True
        return not (self.requests.is_idle or self.is_paused)

    def forget_all(self) -> None:
        """Drop all requests, events that were not reported, and calls that wait for a step border.

        The requests can be submitted again. Computed pages stay cached.
        """
        self._calls_between_steps.clear()
        self.requests.forget_all()

    def call_between_steps(self, call: Callable[[], None]) -> None:
        """Run ``call`` at the next step border: in ``step``, before it plans, once no step is in flight.

        No step is launched until then; what is in flight is collected, deadlines and aborts still act. An exception of
        ``call`` is raised by ``step``.
        """
        self._calls_between_steps.append(call)

    def _run_calls_between_steps(self) -> None:
        calls, self._calls_between_steps = self._calls_between_steps, []
        for call in calls:
            call()

    def _plan(self, now: float) -> Plan | None:
        if self.is_paused or self._calls_between_steps:
            self.requests.expire(now)
            return None
        with self._trace.part("schedule"):
            return self.scheduler.schedule(now)

    def _launch(self, plan: Plan) -> None:
        self._num_launched += 1
        try:
            with self._trace.launch(self._num_launched, plan):
                self._in_flight.append((plan, self._runner.launch(plan)))
        except Exception as error:
            self._fail(plan, error)

    def _collect(self, now: float) -> StepOutput | None:
        plan, ticket = self._in_flight.popleft()
        try:
            with self._trace.part("collect"):
                result = self._runner.collect(ticket)
                result.check(plan)
        except Exception as error:
            self._fail(plan, error)
            return None
        self._num_failures = 0
        collected_at = now if self._clock is None else self._clock()
        with self._trace.part("apply"):
            return self.scheduler.apply(plan, result, collected_at)

    def _fail(self, plan: Plan, error: Exception) -> None:
        """The requests of the plan end; the engine goes on, unless it fails again and again."""
        self._num_failures += 1
        self.scheduler.fail(plan, describe(error))
        if self._num_failures >= MAX_FAILURES:
            raise error
