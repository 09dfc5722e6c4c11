"""Scheduler: ``schedule`` plans the next step, ``apply`` takes in the result of a step.

Every plan has one row for each request that computes something in that step (``planner`` chooses them). Plans may be
launched before earlier ones are applied. A row whose request was preempted or ended in between is *late*: its tokens do
not count, and what it wrote lies in pages that are not its own any more; their next owner writes them again.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from aioengine.memory.prefix_cache import PrefixCache
from aioengine.memory.snapshots import Snapshots
from aioengine.memory.windowed_cache import WindowedCache
from aioengine.page_groups import PageGroups
from aioengine.protocol.columns import POOLED_VECTOR
from aioengine.protocol.messages import End, FinishCode, Stats, StepOutput
from aioengine.protocol.packed_logprobs import NEXT_LOGPROBS
from aioengine.scheduler.plan import DISTRIBUTION, TOKENS, VECTOR
from aioengine.scheduler.planner import Flight, Planner
from aioengine.scheduler.request import end_of
from aioengine.scheduler.requests import Requests

if TYPE_CHECKING:
    from aioengine.config import SchedulerSettings
    from aioengine.scheduler.plan import Plan, Row, StepResult
    from aioengine.scheduler.request import Request

_GIVEN = {TOKENS: "token", VECTOR: "vector", DISTRIBUTION: "distribution"}


class Scheduler:
    """Chooses what each step computes. It has no I/O and no clock.

    Attributes:
        requests: the living requests. cache: their pages.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        num_pages: int,
        page_size: int,
        num_adapter_slots: int = 0,
        windows: tuple[int | None, ...] = (),
        num_snapshots: int = 0,
    ) -> None:
        """``windows``: of the groups of layers that have pages of their own (``PageGroups``); empty: one for all.

        num_snapshots: of states that have room.
        """
        groups = PageGroups(windows=windows or (None,), page_size=page_size, min_tokens=settings.min_tokens)
        enabled, span, snapshots = settings.prefix_cache, settings.snapshot_tokens, None
        if span:  # without a snapshot nothing can be reused
            enabled = enabled and num_snapshots > 0 and not windows
            snapshots = Snapshots(num_snapshots, span=span, page_size=page_size) if enabled else None
        if windows:
            self.cache: PrefixCache = WindowedCache(groups, num_pages=num_pages, enabled=enabled)
        else:
            self.cache = PrefixCache(num_pages=num_pages, page_size=page_size, enabled=enabled, snapshots=snapshots)
        pool_tokens = groups.tokens_in(num_pages, settings.context_length)
        self.requests = Requests(settings, self.cache, pool_tokens=pool_tokens, num_adapter_slots=num_adapter_slots)
        self._outbox = self.requests.outbox
        self._planner = Planner(settings, self.requests)
        self._flights: deque[Flight] = deque()  # launched, not yet applied
        self._applied_at = 0.0

    def schedule(self, now: float) -> Plan | None:
        """The next step, or None when there is nothing to compute before a step in flight is applied.

        Every plan must be given to ``apply``, in the same order, or to ``fail``.
        """
        requests = self.requests
        requests.expire(now)
        flight = Flight(now)
        requests.is_stalled = not self._flights  # until the planner or a change of the requests clears it
        self._planner.fill(flight, now, is_overlapped=bool(self._flights))
        if not flight.requests:
            return None
        requests.is_stalled = False
        flight.plan.closed, requests.closed = requests.closed, []
        self._flights.append(flight)
        return flight.plan

    # ------------------------------------------------------------ results

    def apply(self, plan: Plan, result: StepResult, now: float) -> StepOutput:
        """Take in the result of the oldest plan in flight, which fits it (``StepResult.check``).

        Returns the tokens that count, with all events since the last time.
        """
        flight = self._take_flight(plan)
        self.requests.pace.note_step(now - max(flight.planned_at, self._applied_at), flight.num_prompt_tokens)
        self._applied_at = now
        cache = self.cache
        single, others = _by_row(plan, result)
        limits: dict[int, int] = {}  # uid -> how many of its tokens count, where that is not all
        for row, request, allocation, token_id in zip(
            plan.rows, flight.requests, flight.allocations, single, strict=True
        ):
            if request.allocation is not allocation:
                limits[row.uid] = 0  # late
                continue
            if token_id < 0:
                num_taken = self._take_other(row, request, result, others.get(row.uid), now=now)
                if num_taken is not None:
                    limits[row.uid] = num_taken
                continue
            end = row.start + row.count
            if end >= allocation.next_insert_at:
                cache.insert(allocation, request.token_ids, end)
            known = request.token_ids
            known.append(token_id)
            if not request.history.is_text_open:
                self._outbox.open_text(request, now)
            if token_id in request.stop_ids or len(known) >= request.max_tokens:
                ended = end_of(request)
                if row.uid in result.complete and (ended is None or ended.code is FinishCode.LENGTH):
                    continue  # it ends with this token
                if ended is not None:
                    self.requests.end(request, ended)
                elif len(known) >= request.max_tokens:
                    self._restart_long(request)
        if result.complete:
            self._end_complete(flight, result)
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
        if error is None and new is None and row.outputs:
            error = f"the runner gave no {_GIVEN[row.outputs]}"
        if error is not None:
            failed = End(row.uid, FinishCode.FAILED, stage="sample", message=error)
            self.requests.end(request, failed, is_invalid=True)
            return 0
        end = row.start + row.count
        if end >= request.allocation.next_insert_at:
            self.cache.insert(request.allocation, request.token_ids, end)
        if new is None:  # a part of a prompt
            return None
        is_last = bool(row.outputs & (VECTOR | DISTRIBUTION))
        if (new or is_last) and not request.history.is_text_open:
            self._outbox.open_text(request, now)
        if is_last:
            self.requests.end(request, End(row.uid, FinishCode.STOP if row.outputs & VECTOR else FinishCode.LENGTH))
            return None
        is_complete = row.uid in result.complete  # it ends with the last of its tokens
        for num_taken, token_id in enumerate(new, 1):
            request.token_ids.append(token_id)
            ended = end_of(request)
            if ended is not None and not (ended.code is FinishCode.LENGTH and is_complete and num_taken == len(new)):
                self.requests.end(request, ended)
                return num_taken
        if is_complete:
            return None
        if len(request.token_ids) >= request.max_tokens:
            self._restart_long(request)
        else:
            request.rewind(end)
        return None

    def _restart_long(self, request: Request) -> None:
        """Compute a running request, of which no row is in flight, from its start with the rotations of long texts."""
        request.max_tokens = request.history.most_tokens
        self.requests.release([request.uid])

    def _end_complete(self, flight: Flight, result: StepResult) -> None:
        """End the requests whose grammar allows no further token, unless they are over or their rows are late."""
        for row, request, allocation in zip(flight.plan.rows, flight.requests, flight.allocations, strict=True):
            if row.uid in result.complete and request.allocation is allocation:
                self.requests.end(request, End(row.uid, FinishCode.STOP))

    def fail(self, plan: Plan, message: str) -> None:
        """A plan in flight has no result: its requests end, all others go on.

        Whether the runner has read a plan that could not be launched is unknown: what it closed is closed again, and
        what it opened without a row is admitted again.
        """
        num_later = len(self._flights) - 1 - self._place_of(plan)
        flight = self._take_flight(plan)
        for request, allocation in zip(flight.requests, flight.allocations, strict=True):
            if request.allocation is allocation:
                self.requests.end(request, End(request.uid, FinishCode.FAILED, stage="forward", message=message))
        if num_later == 0:
            self.requests.closed = plan.closed + self.requests.closed
            running = {request.uid for request in self.requests.running}
            self.requests.release(new.uid for new in plan.new_rows if new.uid in running)

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

    def stats(self, now: float) -> Stats:
        """A snapshot of the counters, dated ``now``."""
        requests, cache = self.requests, self.cache
        return Stats(
            **asdict(self._outbox.totals),
            sent_at=now,
            num_running=len(requests.running),
            num_waiting=len(requests.waiting) + len(requests.gated),
            num_pages=cache.num_pages,
            num_free_pages=cache.num_free,
            num_cached_pages=cache.num_cached,
            num_pinned_pages=cache.num_pinned,
            step_ended_at=self._applied_at,
        )

    def check_integrity(self) -> None:
        """Raises RuntimeError unless free, cached and owned pages add up. Cheap when no request runs."""
        self.cache.check_integrity(request.allocation for request in self.requests.running)
        self.requests.adapters.check_integrity()


def _by_row(plan: Plan, result: StepResult) -> tuple[list[int], dict[int, list[int]]]:
    """For each row of the plan its only token, -1 for any other row; and by uid the tokens of those other rows.

    These have an entry where they gave what they should: none or several tokens, a vector, or a distribution.
    """
    tokens = result.tokens
    others: dict[int, list[int]] = {}
    single = tokens.token_ids
    if tokens.counts is not None:
        given = {extra.uid for extra in tokens.extras if extra.kind in (POOLED_VECTOR, NEXT_LOGPROBS)}
        rows = [row for row in plan.rows if row.outputs]
        single = list[int]()
        for row, new in zip(rows, tokens.rows(), strict=True):
            ids = [new] if isinstance(new, int) else new
            single.append(ids[0] if len(ids) == 1 else -1)
            if len(ids) != 1 and (row.outputs & TOKENS or row.uid in given):
                others[row.uid] = ids
    if len(single) < len(plan.rows) or result.failed:
        each = iter(single)
        of_rows = [(row.uid, next(each) if row.outputs else -1) for row in plan.rows]
        single = [-1 if uid in result.failed else token_id for uid, token_id in of_rows]
    return single, others
