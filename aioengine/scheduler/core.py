"""SchedulerCore runs the step. It has no I/O: a process loop, a test or a benchmark calls ``step``."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from aioengine.errors import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from aioengine.protocol.messages import Control, Progress, Reply, StepOutput
    from aioengine.scheduler.plan import Plan, StepResult
    from aioengine.scheduler.scheduler import Scheduler
    from aioengine.settings.config import Settings

Ticket = TypeVar("Ticket")

MAX_FAILURES = 3  # after this many failed steps in a row, the runner is considered broken


class Runner(Protocol[Ticket]):
    """The device side of a step.

    Plans are launched in order and collected in the same order. A plan may be launched before an earlier plan is
    collected. Its decode rows then use tokens that only the device knows. Pages are written in launch order, so pages
    freed after a launch may be used by a later plan. A plan may close a uid that the runner does not know (because its
    launch failed), or a uid whose row is still in flight.
    """

    @property
    def facts(self) -> Mapping[str, str | int | float | bool]:
        """Facts about the device, for ``Ready``. ``num_pages`` (int) is the size of the KV pool."""
        ...

    def launch(self, plan: Plan) -> Ticket:
        """Start the step and return without waiting for the device."""
        ...

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for the step and return its result."""
        ...

    def control(self, order: Control) -> Reply:
        """Run a control message, for example to load weights or an adapter, or to free memory.

        Called between steps, when every launched plan has been collected. The reply has the ``call_id`` of the order.
        The same order can arrive twice if the detokenizer process was replaced before the reply arrived.

        Raises:
            UnknownOrderError: the runner does not implement this order.
            Exception: the order failed. The exception is the reply. Requests continue, so the runner must be unchanged.
        """
        ...

    def close(self) -> None: ...


class Trace(Protocol):
    """Records the parts of a step in a profile."""

    def part(self, name: str) -> AbstractContextManager[object]:
        """Return a context manager for a range named ``name``."""
        ...

    def launch(self, number: int, plan: Plan) -> AbstractContextManager[object]:
        """Return a context manager for the launch of ``plan``. Steps are numbered from 1."""
        ...


class NoTrace:
    """Does nothing without a profiler."""

    _nothing = nullcontext()

    def part(self, name: str) -> AbstractContextManager[object]:
        return self._nothing

    def launch(self, number: int, plan: Plan) -> AbstractContextManager[object]:
        return self._nothing


class RunnerFactory(Protocol):
    """The function named by ``settings.runner.factory``: builds the runner, and reports slow work to ``report``."""

    def __call__(self, settings: Settings, report: Callable[[Progress], None], /) -> Runner[Any]: ...


class SchedulerCore(Generic[Ticket]):
    """Scheduler and runner together. Each ``step`` plans and launches a step, and collects the step that is due.

    Attributes:
        scheduler: plans the steps. requests: its requests; submit and abort them here, between two steps.
        is_paused: while True, no step is launched. Steps in flight are collected; deadlines and aborts still work.
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
        """depth: number of steps that may be in flight in addition to the newest one. With 0, each step is collected
        before the next is planned. With 1, the next step is planned and launched while the device computes.
        clock: time of collection; default: the ``now`` of the step, which does not include the wait.
        trace: records the parts of each step.
        """
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
        """Plan, launch, collect the step that is due, apply it. Return None if there is nothing to report.

        Raises the runner's exception after ``MAX_FAILURES`` failed steps in a row.
        """
        if self._calls_between_steps and not self._in_flight:
            calls, self._calls_between_steps = self._calls_between_steps, []
            for call in calls:
                call()
        plan: Plan | None = None
        if self.is_paused or self._calls_between_steps:
            self.requests.expire(now)
        else:
            with self._trace.part("schedule"):
                plan = self.scheduler.schedule(now)
        if plan is not None:
            self._launch(plan)
        is_due = len(self._in_flight) > self._depth or plan is None
        output = self._collect(now) if is_due and self._in_flight else None
        if output is None and self.requests.events.has_events:
            output = self.requests.events.take()
        return output

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do before the next message or deadline."""
        if self._in_flight or self.requests.events.has_events or self._calls_between_steps:
            return True
        return not (self.requests.is_idle or self.is_paused)

    def forget_all(self) -> None:
        """Drop all requests, unreported events, and waiting calls. Computed pages stay cached.

        The same requests can be submitted again.
        """
        self._calls_between_steps.clear()
        self.requests.forget_all()

    def call_between_steps(self, call: Callable[[], None]) -> None:
        """Run ``call`` in ``step`` when no step is in flight, before the next plan.

        No step is launched until then. Steps in flight are collected; deadlines and aborts still work. ``step`` raises
        the exception of ``call``.
        """
        self._calls_between_steps.append(call)

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
        """End the requests of the plan. Raise ``error`` after ``MAX_FAILURES`` failures in a row."""
        self._num_failures += 1
        self.scheduler.fail(plan, describe(error))
        if self._num_failures >= MAX_FAILURES:
            raise error
