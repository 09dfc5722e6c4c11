"""Scheduler: ``schedule`` says what the next step computes, ``apply`` takes in what a step gave.

Every step has one row for each running request that has something to compute: decode rows first, in the order of rank,
then parts of prompts within the token budget. Steps may be launched before earlier ones are applied; a row whose
request was preempted or ended in between is *late*, and its token is thrown away.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from aioengine.protocol.messages import FinishCode, Stats, StepOutput
from aioengine.scheduler.admission import Admission, Refusal
from aioengine.scheduler.budget import TokenBudget
from aioengine.scheduler.lifecycle import Lifecycle
from aioengine.scheduler.plan import OpenedRow, Plan, Row, StepResult
from aioengine.scheduler.stopping import Finish, finish_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aioengine.config import SchedulerSettings
    from aioengine.memory.prefix_cache import Hold
    from aioengine.protocol.messages import Submit
    from aioengine.scheduler.request import Request


class Flight:
    """A plan on its way: beside each row its request, and the pages that this held when the plan was made."""

    __slots__ = ("holds", "plan", "requests")

    def __init__(self) -> None:
        self.plan = Plan([])
        self.requests: list[Request] = []
        self.holds: list[Hold] = []

    def add(self, row: Row, request: Request) -> None:
        """``request`` computes ``row``; its counts move on as if that were done."""
        self.plan.rows.append(row)
        self.requests.append(request)
        self.holds.append(request.hold)
        request.num_computed += row.count
        if row.samples:
            request.num_tokens += 1
            request.holds_last = True


class Scheduler:
    """Decides, and keeps all state of the requests. It calls nobody and waits for nothing."""

    def __init__(self, settings: SchedulerSettings, *, num_pages: int, page_size: int) -> None:
        if settings.max_running < 1 or settings.chunk_tokens < 1:
            raise ValueError(
                f"max_running ({settings.max_running}) and chunk_tokens ({settings.chunk_tokens}) must be at least 1"
            )
        self._max_running = settings.max_running
        self._chunk_tokens = settings.chunk_tokens
        self._life = Lifecycle(settings, num_pages=num_pages, page_size=page_size)
        self._outbox = self._life.outbox
        self.cache = self._life.cache
        self._admission = Admission(self.cache, settings.chunk_tokens)
        self._flights: deque[Flight] = deque()  # launched, not yet applied

    # ------------------------------------------------------------ requests come and go

    @property
    def has_requests(self) -> bool:
        """Whether any request is alive, waiting or running."""
        return not self._life.is_empty

    @property
    def has_events(self) -> bool:
        """Whether something ended that no ``StepOutput`` has told yet."""
        return self._outbox.has_events

    def submit(self, submit: Submit) -> None:
        """Queue a request; one that can never run is ended at once. Raises ValueError for a uid that is alive."""
        self._life.submit(submit)

    def abort(self, uids: Iterable[int], code: FinishCode = FinishCode.ABORT, message: str = "") -> None:
        """End requests from outside, in any state; unknown uids are ignored. STOP ends them without an ``Ended``."""
        self._life.abort(uids, code, message)

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
        flight = Flight()
        num_preemptions = self._outbox.totals.num_preemptions
        prompts = self._place_decodes(flight)
        pages_are_short = self._outbox.totals.num_preemptions > num_preemptions
        self._place_prompts(flight, prompts, None if pages_are_short else now)
        if not flight.requests:
            return None
        flight.plan.closed = self._life.closed
        self._life.closed = []
        self._flights.append(flight)
        return flight.plan

    def _place_decodes(self, flight: Flight) -> list[Request]:
        """One row for each request whose newest token the runner holds; returns the other running ones.

        Pages are taken from the last of the running; so nobody who has a row already loses them.
        """
        prompts: list[Request] = []
        rows, requests, holds = flight.plan.rows, flight.requests, flight.holds
        for request in self._life.running:
            if not request.holds_last:
                prompts.append(request)
                continue
            start = request.num_computed
            if start + 1 >= request.max_tokens:
                continue  # its last token is on its way
            hold = request.hold
            if start < hold.room:
                row = Row(request.uid, start, 1, True)
            else:
                page = self._grow(request)
                if page is None:
                    continue
                row = Row(request.uid, start, 1, True, [], [page])
            rows.append(row)
            requests.append(request)
            holds.append(hold)
            request.num_computed = start + 1
            request.num_tokens += 1
        return prompts

    def _grow(self, request: Request) -> int | None:
        """A page for the next position, preempting others where none is left; None: ``request`` was the last itself."""
        while (page := self.cache.grow(request.hold)) is None:
            if self._life.preempt() is request:
                return None
        return page

    def _place_prompts(self, flight: Flight, prompts: list[Request], admit_at: float | None) -> None:
        """Share the rest of the step among the prompts: the first of the running, then the shorter, then new ones."""
        budget = TokenBudget(self._chunk_tokens, len(flight.requests))
        prompts[1:] = sorted(prompts[1:], key=lambda request: request.num_missing)
        shares = [(request, budget.take_share(request.num_missing)) for request in prompts]
        if admit_at is not None and self._life.waiting:
            num_partial = sum(share < request.num_missing for request, share in shares)
            for request in self._admit(budget, num_partial, admit_at):
                flight.plan.opened.append(_opened_row(request))
                shares.append((request, budget.take_share(request.num_missing)))
        for request, share in shares:
            count = share + budget.take_rest(request.num_missing - share)
            if count:
                flight.add(_prompt_row(request, count), request)

    def _admit(self, budget: TokenBudget, num_partial: int, now: float) -> Iterable[Request]:
        """Let waiting requests run, one by one; the caller takes the share of each from ``budget`` in between."""
        running = self._life.running
        if not budget.left or len(running) >= self._max_running:
            return
        for request in list(self._life.candidates()):
            answer = self._admission.ask(request, running, left=budget.left, num_partial=num_partial)
            if answer is Refusal.LATER:
                continue
            if isinstance(answer, Refusal):
                if not running:
                    self._life.end(request, Finish(FinishCode.FAILED, stage="schedule", message=_PINNED))
                return
            num_missing = request.num_tokens - len(answer.path) * self.cache.page_size
            num_partial += num_missing > budget.left
            self._life.admit(request, answer, now)
            yield request
            if not budget.left or len(running) >= self._max_running:
                return

    # ------------------------------------------------------------ what a step gave

    def apply(self, plan: Plan, result: StepResult, now: float) -> StepOutput:
        """Take in the tokens of the oldest plan in flight; returns them with all that happened since the last time."""
        flight = self._take_flight(plan)
        uids: list[int] = []
        token_ids: list[int] = []
        sampled = iter(result.token_ids)
        cache = self.cache
        for row, request, hold in zip(plan.rows, flight.requests, flight.holds, strict=True):
            token_id = next(sampled, -1) if row.samples else -1
            if request.hold is not hold:
                continue  # late
            end = row.start + row.count
            if end >= hold.border:
                cache.insert(hold, request.token_ids, end)
            if not row.samples:
                continue
            if token_id < 0:
                message = result.failed.get(row.uid, "the runner gave no token")
                self._life.end(request, Finish(FinishCode.FAILED, stage="sample", message=message))
                continue
            known = request.token_ids
            known.append(token_id)
            uids.append(row.uid)
            token_ids.append(token_id)
            if not request.marks.is_opened:
                self._outbox.open(request, now)
            if token_id in request.stop_ids or len(known) >= request.max_tokens:
                finish = finish_of(request)
                if finish is not None:
                    self._life.end(request, finish)
        self._outbox.totals.num_steps += 1
        self._outbox.totals.output_tokens += len(uids)
        return self._outbox.take(uids, token_ids)

    def fail(self, plan: Plan, message: str) -> None:
        """A plan in flight gave nothing: its requests end, all others go on.

        Whether the runner has read a plan that could not be launched is unknown; what it closed is closed again.
        """
        is_newest = plan is self._flights[-1].plan
        flight = self._take_flight(plan)
        if is_newest:
            self._life.closed = plan.closed + self._life.closed
        finish = Finish(FinishCode.FAILED, stage="forward", message=message)
        for request, hold in zip(flight.requests, flight.holds, strict=True):
            if request.hold is hold:
                self._life.end(request, finish)

    def take_events(self) -> StepOutput:
        """What happened since the last ``StepOutput``, without tokens."""
        return self._outbox.take([], [])

    def _take_flight(self, plan: Plan) -> Flight:
        for flight in self._flights:
            if flight.plan is plan:
                self._flights.remove(flight)
                return flight
        raise ValueError("this plan is not in flight; each plan is applied or failed exactly once")

    # ------------------------------------------------------------ figures

    def stats(self, now: float, step_ended_at: float) -> Stats:
        """A snapshot of the counters."""
        totals = self._outbox.totals
        return Stats(
            sent_at=now,
            num_running=len(self._life.running),
            num_waiting=len(self._life.waiting),
            num_pages=self.cache.num_pages,
            num_free_pages=self.cache.num_free,
            num_cached_pages=self.cache.num_cached,
            num_preemptions=totals.num_preemptions,
            num_steps=totals.num_steps,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            output_tokens=totals.output_tokens,
            num_finished=totals.num_finished,
            num_aborted=totals.num_aborted,
            step_ended_at=step_ended_at,
        )

    def check_integrity(self) -> None:
        """Raises RuntimeError unless free, cached and owned pages add up. Cheap when nothing runs."""
        self._life.check_integrity()


_PINNED = "the prompt does not fit beside the pinned pages of the KV pool; close a session or shorten the prompt"


def _opened_row(request: Request) -> OpenedRow:
    return OpenedRow(
        request.uid,
        request.submit.sampling,
        request.num_prompt,
        request.token_ids.copy(),
        request.hold.pages.copy(),
    )


def _prompt_row(request: Request, count: int) -> Row:
    start = request.num_computed
    samples = start + count == request.num_tokens
    return Row(request.uid, start, count, samples, request.token_ids[start : start + count])
