"""Scheduler: ``schedule`` says what the next step computes, ``apply`` takes in what a step gave.

Every plan has one row for each request that computes something in that step (``planner`` chooses them). Plans may be
launched before earlier ones are applied. A row whose request was preempted or ended in between is *late*: its token is
thrown away, and what it wrote lies in pages that are not its own any more, which whoever got them writes again.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from aioengine.protocol.columns import POOLED_VECTOR
from aioengine.protocol.messages import FinishCode, Stats, StepOutput
from aioengine.scheduler.gates import Gate
from aioengine.scheduler.lifecycle import Lifecycle
from aioengine.scheduler.plan import TOKENS, VECTOR
from aioengine.scheduler.planner import Flight, Planner
from aioengine.scheduler.stopping import Finish, finish_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aioengine.config import SchedulerSettings
    from aioengine.protocol.messages import Submit
    from aioengine.scheduler.plan import Plan, Row, StepResult
    from aioengine.scheduler.request import Request


class Scheduler:
    """Decides, and keeps all state of the requests. It calls nobody and waits for nothing."""

    def __init__(self, settings: SchedulerSettings, *, num_pages: int, page_size: int) -> None:
        self._life = Lifecycle(settings, num_pages=num_pages, page_size=page_size)
        self._outbox = self._life.outbox
        self.cache = self._life.cache
        self._planner = Planner(settings, self._life)
        self._flights: deque[Flight] = deque()  # launched, not yet applied
        self._applied_at = 0.0

    # ------------------------------------------------------------ requests come and go

    @property
    def has_requests(self) -> bool:
        """Whether ``schedule`` may have something to compute: a request waits or runs, and its gates are open."""
        return not self._life.is_idle

    @property
    def has_events(self) -> bool:
        """Whether something ended that no ``StepOutput`` has told yet."""
        return self._outbox.has_events

    def submit(self, submit: Submit, now: float = 0.0) -> None:
        """Queue a request; one that can never run is ended at once. Raises ValueError for a uid that is alive.

        ``now``: no earlier than its arrival; for those that are to be refused when they come too late.
        """
        self._life.submit(submit, max(now, submit.arrived_at))

    def abort(self, uids: Iterable[int] | None, code: FinishCode = FinishCode.ABORT, message: str = "") -> None:
        """End requests from outside, in any state; unknown uids are ignored. STOP ends them without an ``Ended``.

        None: all, as if they had never been, but that what was computed is cached.
        """
        self._life.abort(uids, code, message)

    def close_gate(self, uids: Iterable[int], gate: Gate) -> None:
        """As ``SchedulerCore.close_gate``."""
        self._check_gate(gate)
        for request in self._life.living(uids):
            self._life.close_gate(request, gate)

    def open_gate(self, uids: Iterable[int], gate: Gate) -> None:
        """As ``SchedulerCore.open_gate``."""
        self._check_gate(gate)
        for request in self._life.living(uids):
            self._life.open_gate(request, gate)

    @staticmethod
    def _check_gate(gate: Gate) -> None:
        if gate is Gate.PREFIX:
            raise ValueError("Gate.PREFIX belongs to admission; a call can open and close every other gate")

    def expire(self, now: float) -> None:
        """End the requests whose deadline has passed; ``schedule`` does it too."""
        self._life.expire(now)

    def next_deadline(self) -> float | None:
        """When ``expire`` should be called at the latest, even if nothing else happens; None: no need."""
        return self._life.next_deadline()

    # ------------------------------------------------------------ what runs next

    def schedule(self, now: float) -> Plan | None:
        """The next step, or None when there is nothing to compute before a step in flight is applied.

        Every plan must be given to ``apply``, in the same order, or to ``fail``.
        """
        self._life.expire(now)
        flight = Flight(now)
        self._life.is_stalled = not self._flights  # until the planner or a change of the requests says otherwise
        self._planner.fill(flight, now)
        if not flight.requests:
            return None
        self._life.is_stalled = False
        flight.plan.closed = self._life.closed
        self._life.closed = []
        self._flights.append(flight)
        return flight.plan

    # ------------------------------------------------------------ what a step gave

    def apply(self, plan: Plan, result: StepResult, now: float) -> StepOutput:
        """Take in the tokens of the oldest plan in flight; returns them with all that happened since the last time."""
        flight = self._take_flight(plan)
        self._life.pace.note_step(now - max(flight.planned_at, self._applied_at), flight.num_prompt_tokens)
        self._applied_at = now
        cache = self.cache
        single, others = _by_row(plan, result)
        limits: dict[int, int] = {}  # uid -> how many of its tokens count, where that is not all
        for row, request, hold, token_id in zip(plan.rows, flight.requests, flight.holds, single, strict=True):
            if request.hold is not hold:
                limits[row.uid] = 0  # late
                continue
            if token_id < 0:
                num_taken = self._take_other(row, request, result, others.get(row.uid), now=now)
                if num_taken is not None:
                    limits[row.uid] = num_taken
                continue
            end = row.start + row.count
            if end >= hold.border:
                cache.insert(hold, request.token_ids, end)
            known = request.token_ids
            known.append(token_id)
            if not request.marks.is_opened:
                self._outbox.open(request, now)
            if token_id in request.stop_ids or len(known) >= request.max_tokens:
                finish = finish_of(request)
                if finish is not None:
                    self._life.end(request, finish)
        tokens = result.tokens.limited(limits)
        self._outbox.totals.num_steps += 1
        self._outbox.totals.output_tokens += len(tokens.token_ids)
        return self._outbox.take(tokens)

    def _take_other(
        self, row: Row, request: Request, result: StepResult, new: list[int] | None, *, now: float
    ) -> int | None:
        """Take in a row that does not give exactly one token; returns how many tokens count, None for all of them.

        new: its tokens; None where it has none and should have given something.
        """
        error = result.failed.get(row.uid)
        if error is None and new is None and row.gives:
            error = f"the runner gave no {'vector' if row.gives & VECTOR else 'token'}"
        if error is not None:
            self._life.end(request, Finish(FinishCode.FAILED, stage="sample", message=error), is_spoilt=True)
            return 0
        end = row.start + row.count
        if end >= request.hold.border:
            self.cache.insert(request.hold, request.token_ids, end)
        if not row.gives or new is None:
            return None
        if (new or row.gives & VECTOR) and not request.marks.is_opened:
            self._outbox.open(request, now)
        if row.gives & VECTOR:
            self._life.end(request, Finish(FinishCode.STOP))
            return None
        for num_taken, token_id in enumerate(new, 1):
            request.token_ids.append(token_id)
            finish = finish_of(request)
            if finish is not None:
                self._life.end(request, finish)
                return num_taken
        request.fall_behind(end)
        return None

    def fail(self, plan: Plan, message: str) -> None:
        """A plan in flight gave nothing: its requests end, all others go on.

        Whether the runner has read a plan that could not be launched is unknown; what it closed is closed again.
        """
        num_later = len(self._flights) - 1 - self._place_of(plan)
        flight = self._take_flight(plan)
        if num_later == 0:
            self._life.closed = plan.closed + self._life.closed
        finish = Finish(FinishCode.FAILED, stage="forward", message=message)
        for request, hold in zip(flight.requests, flight.holds, strict=True):
            if request.hold is hold:
                self._life.end(request, finish)

    def take_events(self) -> StepOutput:
        """What happened since the last ``StepOutput``, without tokens."""
        return self._outbox.take()

    def _take_flight(self, plan: Plan) -> Flight:
        flight = self._flights[self._place_of(plan)]
        self._flights.remove(flight)
        return flight

    def _place_of(self, plan: Plan) -> int:
        for place, flight in enumerate(self._flights):
            if flight.plan is plan:
                return place
        raise ValueError("this plan is not in flight; each plan is applied or failed exactly once")

    # ------------------------------------------------------------ figures

    def stats(self, now: float, step_ended_at: float) -> Stats:
        """A snapshot of the counters."""
        return Stats(
            **asdict(self._outbox.totals),
            sent_at=now,
            num_running=len(self._life.running),
            num_waiting=len(self._life.waiting) + len(self._life.gated),
            num_pages=self.cache.num_pages,
            num_free_pages=self.cache.num_free,
            num_cached_pages=self.cache.num_cached,
            step_ended_at=step_ended_at,
        )

    def check_integrity(self) -> None:
        """Raises RuntimeError unless free, cached and owned pages add up. Cheap when nothing runs."""
        self.cache.check_integrity(request.hold for request in self._life.running)


def _by_row(plan: Plan, result: StepResult) -> tuple[list[int], dict[int, list[int]]]:
    """For each row of the plan its only token, -1 for any other row; and by uid the tokens of those other rows.

    These have an entry where they gave what they should, none or several tokens or a vector.
    """
    tokens = result.tokens
    others: dict[int, list[int]] = {}
    single = tokens.token_ids
    if tokens.counts is not None:
        vectors = {extra.uid for extra in tokens.extras if extra.kind == POOLED_VECTOR}
        rows = [row for row in plan.rows if row.gives]
        single = list[int]()
        for row, new in zip(rows, tokens.rows(), strict=True):
            ids = [new] if isinstance(new, int) else new
            single.append(ids[0] if len(ids) == 1 else -1)
            if len(ids) != 1 and (row.gives & TOKENS or row.uid in vectors):
                others[row.uid] = ids
    if len(single) < len(plan.rows) or result.failed:
        each = iter(single)
        of_rows = [(row.uid, next(each) if row.gives else -1) for row in plan.rows]
        single = [-1 if uid in result.failed else token_id for uid, token_id in of_rows]
    return single, others
