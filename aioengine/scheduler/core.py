"""SchedulerCore: the step. It has no I/O; a process loop, a test or a benchmark calls ``step``."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from aioengine.protocol.messages import FinishCode
from aioengine.scheduler.gates import Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from aioengine.config import Settings
    from aioengine.protocol.messages import Control, Progress, Reply, Stats, StepOutput, Submit
    from aioengine.scheduler.plan import Plan, StepResult
    from aioengine.scheduler.scheduler import Scheduler

Ticket = TypeVar("Ticket")

MAX_FAILURES = 3  # failed steps in a row; then the runner is taken to be broken


class Runner(Protocol[Ticket]):
    """The device side of a step.

    Plans are launched in order and collected in the same order. A plan may be launched before an earlier one is
    collected: its decode rows then use tokens that only the device knows. Pages named by a plan are written in launch
    order, so pages freed after a launch may be given to a later plan. A plan may close a uid that the runner does not
    know (its launch had failed), or one whose row is still in flight.
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
    """Marks the parts of a step for a profile, as long as one is made."""

    def part(self, name: str) -> AbstractContextManager[object]:
        """A range named ``name``."""
        ...

    def launch(self, number: int, plan: Plan) -> AbstractContextManager[object]:
        """The range in which the runner launches ``plan``, the step of this number (from 1)."""
        ...


class NoTrace:
    """Marks nothing."""

    _nothing = nullcontext()

    def part(self, name: str) -> AbstractContextManager[object]:
        return self._nothing

    def launch(self, number: int, plan: Plan) -> AbstractContextManager[object]:
        return self._nothing


class RunnerFactory(Protocol):
    """What ``settings.runner.factory`` names: builds the runner, telling of long work through ``report``."""

    def __call__(self, settings: Settings, report: Callable[[Progress], None], /) -> Runner[Any]: ...


class SchedulerCore(Generic[Ticket]):
    """Scheduler and runner together: each ``step`` plans, launches, and collects the step that is due.

    depth: how many steps may be in flight beside the one just launched. 0 waits for each step before it plans the next;
    1 plans and launches the next while the device computes.
    clock: dates what is collected; without it, the ``now`` of the step, which is then too early by the wait.
    trace: hears of the parts of each step.
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
        if depth < 0:
            raise ValueError(f"depth must be 0 or more, not {depth}")
        self._scheduler = scheduler
        self._runner = runner
        self._depth = depth
        self._clock = clock
        self._trace: Trace = NoTrace() if trace is None else trace
        self._in_flight: deque[tuple[Plan, Ticket]] = deque()
        self._border_calls: list[Callable[[], None]] = []
        self._num_launched = 0
        self._num_failures = 0
        self._is_paused = False
        self._step_ended_at = 0.0

    def step(self, now: float) -> StepOutput | None:
        """One pass: plan, launch, collect what is due, apply. None: nothing happened that anybody must know.

        Raises what the runner raised when it has failed ``MAX_FAILURES`` times in a row.
        """
        if self._border_calls and not self._in_flight:
            self._run_border_calls()
        plan = self._plan(now)
        if plan is not None:
            self._launch(plan)
        is_due = len(self._in_flight) > self._depth or plan is None
        output = self._collect(now) if is_due and self._in_flight else None
        if output is None and self._scheduler.has_events:
            output = self._scheduler.take_events()
        return output

    @property
    def has_work(self) -> bool:
        """Whether calling ``step`` now does anything. False: nothing to do before a message or ``next_deadline``."""
        if self._in_flight or self._scheduler.has_events or self._border_calls:
            return True
        return self._scheduler.has_requests and not self._is_paused

    def submit(self, submit: Submit, now: float = 0.0) -> None:
        """Queue a request; ``now`` is for those that are to be refused when late.

        Raises ValueError for a uid that is alive.
        """
        self._scheduler.submit(submit, now)

    def abort(self, uids: Iterable[int] | None, code: FinishCode = FinishCode.ABORT, message: str = "") -> None:
        """End requests in whatever state; their pages are free at once. Unknown uids are ignored.

        None: all, as if they had never been; nobody is told, nor of what else happened. They may come again. Calls that
        wait for a step border are dropped, too.

        With STOP the frontend knows already and nothing is said; else the next ``step`` gives one ``Ended`` for each.
        """
        if uids is None:
            self._border_calls.clear()
        self._scheduler.abort(uids, code, message)

    def suspend(self, uids: Iterable[int], *, is_over: bool = False) -> None:
        """Compute nothing more of these requests, or (``is_over``) go on with them: the gate ``SUSPENDED``."""
        change = self.open_gate if is_over else self.close_gate
        change(uids, Gate.SUSPENDED)

    def close_gate(self, uids: Iterable[int], gate: Gate) -> None:
        """Give these requests no row in any later plan until ``open_gate``. Unknown uids are ignored.

        A running request keeps its pages unless ``gate.keeps_pages`` is False; rows in flight still give their tokens
        while it keeps them. A gate that is to hold a new request is closed right after ``submit``. Raises ValueError
        for ``Gate.PREFIX``.
        """
        self._scheduler.close_gate(uids, gate)

    def open_gate(self, uids: Iterable[int], gate: Gate) -> None:
        """Go on with these requests, unless another gate is closed. Unknown uids and open gates are ignored."""
        self._scheduler.open_gate(uids, gate)

    def next_deadline(self) -> float | None:
        """When ``step`` should be called at the latest; None: no request has a deadline."""
        return self._scheduler.next_deadline()

    def pause(self) -> None:
        """Launch nothing more until ``resume``; what is in flight is collected, deadlines and aborts still act."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def call_at_border(self, call: Callable[[], None]) -> None:
        """Run ``call`` at the next step border: in ``step``, before it plans, once no step is in flight.

        Nothing is launched until then; what is in flight is collected, deadlines and aborts still act. An exception of
        ``call`` is raised by ``step``.
        """
        self._border_calls.append(call)

    def flush_cache(self) -> bool:
        """Drop all cached pages that no request uses. True when none is left, False when requests still use some."""
        cache = self._scheduler.cache
        cache.evict(cache.num_pages)
        return cache.num_cached == 0

    def stats(self, now: float) -> Stats:
        """A snapshot of the counters, dated ``now``."""
        return self._scheduler.stats(now, self._step_ended_at)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every page is accounted for; cheap enough to be called on going idle."""
        self._scheduler.check_integrity()

    def _run_border_calls(self) -> None:
        calls, self._border_calls = self._border_calls, []
        for call in calls:
            call()

    def _plan(self, now: float) -> Plan | None:
        if self._is_paused or self._border_calls:
            self._scheduler.expire(now)
            return None
        with self._trace.part("schedule"):
            return self._scheduler.schedule(now)

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
        self._step_ended_at = now if self._clock is None else self._clock()
        with self._trace.part("apply"):
            return self._scheduler.apply(plan, result, self._step_ended_at)

    def _fail(self, plan: Plan, error: Exception) -> None:
        """The requests of the plan end; the engine goes on, unless it fails again and again."""
        self._num_failures += 1
        self._scheduler.fail(plan, f"{type(error).__name__}: {error}")
        if self._num_failures >= MAX_FAILURES:
            raise error
