"""SchedulerCore runs the step. It has no I/O: a process loop, a test or a benchmark calls ``step``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, Protocol

from aioengine.errors import describe
from aioengine.protocol.board import CrashBoard, blank_board
from aioengine.protocol.messages import StepOutput
from aioengine.scheduler.plan import StepPlan
from aioengine.scheduler.runner import Runner, Ticket
from aioengine.scheduler.scheduler import Scheduler

_NOTHING = nullcontext()
MAX_FAILURES = 3  # after this many failed steps in a row, the runner is considered broken


class Trace(Protocol):
    """Records the parts of steps in a profile. running: None while no profile is recorded."""

    @property
    def running(self) -> object: ...

    def part(self, name: str) -> AbstractContextManager[object]:
        """Return a context manager for a range named ``name``."""
        ...

    def launch(self, number: int, plan: StepPlan) -> AbstractContextManager[object]:
        """Return a context manager for the launch of ``plan``. Steps are numbered from 1."""
        ...


class SchedulerCore(Generic[Ticket]):
    """Scheduler and runner together. Each ``step`` plans and launches a step, and collects the step that is due.

    Attributes:
        scheduler: plans the steps. requests: its requests; submit and abort them here, between two steps.
        is_paused: while True, no step is launched. Steps in flight are collected; deadlines and aborts still work.
        is_held: the same, while the weights are incomplete or memory is released.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner[Ticket],
        depth: int,
        *,
        clock: Callable[[], float] | None = None,
        trace: Trace | None = None,
        board: CrashBoard | None = None,
    ) -> None:
        """depth: number of steps that may be in flight in addition to the newest one. With 0, each step is collected
        before the next is planned. With 1, the next step is planned and launched while the device computes.
        clock: time of collection; default: the ``now`` of the step, which does not include the wait.
        trace: records the parts of each step. board: each step is recorded on it from launch to collection.
        """
        self.scheduler = scheduler
        self.requests = scheduler.requests
        self._runner = runner
        self._depth = depth
        self._clock = clock
        self._trace = trace
        self._board = board or CrashBoard(blank_board(depth + 1, 0))
        # The scheduler has its own queue of these plans, because it knows their requests but no tickets.
        self._in_flight: deque[tuple[StepPlan, Ticket]] = deque()
        self._calls_between_steps: list[Callable[[], None]] = []
        self._num_launched = 0
        self._num_failures = 0
        self.is_paused = False
        self.is_held = False

    def step(self, now: float) -> StepOutput | None:
        """Plan, launch, collect the step that is due, apply it. Return None if there is nothing to report.

        Raises the runner's exception after ``MAX_FAILURES`` failed steps in a row.
        """
        if self._calls_between_steps and not self._in_flight:
            calls, self._calls_between_steps = self._calls_between_steps, []
            for call in calls:
                call()
        trace = self._trace if self._trace is not None and self._trace.running else None
        board, in_flight = self._board, self._in_flight
        plan: StepPlan | None = None
        if self.is_paused or self.is_held or self._calls_between_steps:
            self.requests.expire(now)
        else:
            with trace.part("schedule") if trace else _NOTHING:
                plan = self.scheduler.schedule(now)
        if plan is not None:
            self._num_launched += 1
            rows = plan.rows
            board.begin([row.uid for row in rows], lambda: [row.start + row.count for row in rows])
            try:
                with trace.launch(self._num_launched, plan) if trace else _NOTHING:
                    in_flight.append((plan, self._runner.launch(plan)))
                self.scheduler.cache.after_launch()
            except Exception as error:
                board.forget()
                self._fail(plan, error)
        output: StepOutput | None = None
        if in_flight and (plan is None or len(in_flight) > self._depth):
            output = self._collect(now, trace)
        if output is None and self.requests.events.has_events:
            output = self.requests.events.take()
        return output

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do before the next message or deadline."""
        if self._in_flight or self.requests.events.has_events or self._calls_between_steps:
            return True
        return not (self.requests.is_idle or self.is_paused or self.is_held)

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

    def _collect(self, now: float, trace: Trace | None) -> StepOutput | None:
        """Wait for the oldest step in flight and apply its result. Return None if the step failed."""
        plan, ticket = self._in_flight.popleft()
        try:
            with trace.part("collect") if trace else _NOTHING:
                result = self._runner.collect(ticket)
        except Exception as error:
            self._fail(plan, error)
            return None
        finally:
            self._board.end()
        self._num_failures = 0
        collected_at = now if self._clock is None else self._clock()
        with trace.part("apply") if trace else _NOTHING:
            return self.scheduler.apply(result, collected_at)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """End the requests of the plan. Raise ``error`` after ``MAX_FAILURES`` failures in a row."""
        self._num_failures += 1
        self.scheduler.fail(plan, describe(error))
        if self._num_failures >= MAX_FAILURES:
            raise error
