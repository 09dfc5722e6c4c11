"""Scheduler: ``schedule`` plans the next step, ``apply`` processes the result of a step.

A plan has one row for each request that computes something in the step (``planner`` chooses them). Plans may be
launched before earlier plans are applied. If the request of a row was preempted or ended in between, the row is *late*:
its tokens are dropped. Its KV was written to pages that the request does not own any more; their next owner overwrites
it.
"""

from __future__ import annotations

from collections import deque

from msgspec.structs import asdict

from aioengine.memory.prefix_cache import PrefixCache
from aioengine.memory.snapshots import Snapshots
from aioengine.memory.windowed_cache import WindowedCache
from aioengine.protocol.columns import POOLED_VECTOR, WEIGHT_VERSION, Extra, TokenColumns, draft_extra
from aioengine.protocol.messages import End, FinishCode, Stats, StepOutput
from aioengine.protocol.packed_logprobs import NEXT_LOGPROBS
from aioengine.scheduler.drafting import DraftCosts
from aioengine.scheduler.plan import DISTRIBUTION, TOKENS, VECTOR, Row, StepPlan, StepResult
from aioengine.scheduler.planner import PlanInFlight, Planner
from aioengine.scheduler.request import Request, end_of
from aioengine.scheduler.request_states import Requests
from aioengine.settings.config import SchedulerSettings
from aioengine.settings.page_groups import PageGroups

_OUTPUT_NAMES = {TOKENS: "token", VECTOR: "vector", DISTRIBUTION: "distribution"}


class Scheduler:
    """Plans what each step computes. It has no I/O and no clock.

    Attributes:
        requests: the requests that have not ended. cache: their pages.
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
        """windows: the window of each page group (``PageGroups``); empty: one group without a window.
        num_snapshots: number of state snapshots that fit into the runner's pool.
        """
        groups = PageGroups(windows=windows or (None,), page_size=page_size, min_tokens=settings.min_tokens)
        enabled, span, snapshots = settings.prefix_cache, settings.snapshot_tokens, None
        if span:  # with recurrent states, a prefix can only be reused from a snapshot
            enabled = enabled and num_snapshots > 0 and not windows
            snapshots = Snapshots(num_snapshots, span=span, page_size=page_size) if enabled else None
        if windows:
            self.cache: PrefixCache = WindowedCache(groups, num_pages=num_pages, enabled=enabled)
        else:
            self.cache = PrefixCache(num_pages=num_pages, page_size=page_size, enabled=enabled, snapshots=snapshots)
        pool_tokens = groups.tokens_in(num_pages, settings.context_length)
        self.requests = Requests(settings, self.cache, pool_tokens=pool_tokens, num_adapter_slots=num_adapter_slots)
        self._events = self.requests.events
        self._draft_costs = DraftCosts() if settings.max_drafts else None
        self._planner = Planner(settings, self.requests, self._draft_costs)
        self._flights: deque[PlanInFlight] = deque()  # launched, not yet applied
        self._applied_at = 0.0

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step. Return None if nothing can be computed before a step in flight is applied.

        Pass every plan to ``apply``, in the same order, or to ``fail``.
        """
        requests = self.requests
        if requests.deadlines.heap:
            requests.expire(now)
        flight = PlanInFlight(StepPlan([]), now)
        # If it stays True, nothing can be computed until a request changes: each change sets it to False.
        requests.is_blocked = not self._flights
        self._planner.fill(flight, now, is_overlapped=bool(self._flights))
        if not flight.requests:
            return None
        requests.is_blocked = False
        flight.plan.closed, requests.closed = requests.closed, []
        self._flights.append(flight)
        return flight.plan

    # ------------------------------------------------------------ results

    def apply(self, result: StepResult, now: float) -> StepOutput:
        """Process the result of the oldest plan in flight, which has one entry for each row with outputs.

        Return the accepted tokens and all events since the last call.
        """
        flight = self._flights.popleft()
        plan = flight.plan
        seconds = now - max(flight.planned_at, self._applied_at)
        num_prompt_tokens = flight.num_chunk_tokens - flight.num_draft_row_tokens
        self.requests.estimates.note_step(seconds, num_prompt_tokens)
        self._applied_at = now
        if self._draft_costs is not None and not num_prompt_tokens:
            self._draft_costs.note_step(
                seconds,
                num_rows=len(plan.rows),
                num_drafts=sum(result.num_proposed.values()),
                may_draft=flight.num_drafts > 0,
            )
        cache = self.cache
        # a copy, because requests that end are removed from it
        with_new_weights = self.requests.with_new_weights.copy() if self.requests.with_new_weights else None
        row_tokens, others = result.tokens.token_ids, dict[int, list[int]]()
        has_one_each = result.tokens.counts is None and len(row_tokens) == len(plan.rows)
        if not has_one_each or flight.num_drafts or flight.rejected or result.failed:
            row_tokens, others = _by_row(flight, result)
        limits: dict[int, int] = {}  # uid -> number of accepted tokens, if not all are accepted
        for row, request, allocation, token_id in zip(
            plan.rows, flight.requests, flight.allocations, row_tokens, strict=True
        ):
            if request.allocation is not allocation:
                limits[row.uid] = 0  # late
                continue
            if token_id < 0:  # not exactly one token, see ``_by_row``
                end = row.start + row.count - flight.rejected.get(row.uid, 0)
                num_taken = self._apply_other_row(row, request, result, others.get(row.uid), end=end, now=now)
                if num_taken is not None:
                    limits[row.uid] = num_taken
                continue
            end = row.start + row.count
            if end >= allocation.next_insert_at:
                cache.insert(allocation, request.token_ids, end)
            known = request.token_ids
            known.append(token_id)
            if not request.is_text_open:
                self._events.open_text(request, now)
            if token_id in request.stop_ids or len(known) >= request.next_limit:
                ended = end_of(request)
                if row.uid in result.complete and (ended is None or ended.code is FinishCode.LENGTH):
                    continue  # it is ended below, with STOP instead of LENGTH
                if ended is not None:
                    self.requests.end(request, ended)
                elif len(known) >= request.next_limit:
                    self._restart_long(request)
        if result.complete:  # their grammars allow no further token
            for row, request, allocation in zip(plan.rows, flight.requests, flight.allocations, strict=True):
                if row.uid in result.complete and request.allocation is allocation:
                    self.requests.end(request, End(row.uid, FinishCode.STOP))
        tokens = result.tokens.limited(limits) if limits else result.tokens
        if with_new_weights:
            self._note_weights(flight, tokens, with_new_weights)
        self._events.totals.num_steps += 1
        self._events.totals.output_tokens += len(tokens.token_ids)
        return self._events.take(tokens)

    def _apply_other_row(
        self, row: Row, request: Request, result: StepResult, new: list[int] | None, *, end: int, now: float
    ) -> int | None:
        """Process a row that is not a decode with one token. Return the number of accepted tokens; None: all of them.

        new: its tokens. None: the row has no output. end: number of positions with KV if all its drafts are accepted.
        """
        if row.num_drafts:
            self._note_drafts(row, request, result)
        if num_rejected := result.num_rejected.get(row.uid, 0):
            end -= num_rejected
            request.num_computed -= num_rejected
            request.num_tokens -= num_rejected
            for later in self._flights:
                later.rejected[row.uid] = later.rejected.get(row.uid, 0) + num_rejected
        error = result.failed.get(row.uid)
        is_missing = new is None or (row.outputs == TOKENS and len(request.token_ids) + len(new) <= end)
        if error is None and row.outputs and is_missing:
            error = f"the runner returned no {_OUTPUT_NAMES[row.outputs]}"
        if error is not None:
            stage = "no_token" if row.uid in result.empty else "sample"
            failed = End(row.uid, FinishCode.FAILED, stage=stage, message=error)
            self.requests.end(request, failed, is_invalid=True)
            return 0
        is_complete = row.uid in result.complete  # its grammar allows no token after these
        ended: End | None = None
        num_taken = 0
        for token_id in new or ():
            request.token_ids.append(token_id)
            num_taken += 1
            ended = end_of(request)
            if ended is not None:
                break
        if is_complete and ended is not None and ended.code is FinishCode.LENGTH and num_taken == len(new or ()):
            ended = None  # it ends as complete
        end = min(end, len(request.token_ids))  # tokens after the end of the request are dropped
        if end >= request.allocation.next_insert_at:
            self.cache.insert(request.allocation, request.token_ids, end)
        if new is None:  # a part of a prompt
            return None
        is_last = row.outputs in (VECTOR, DISTRIBUTION)
        if (new or is_last) and not request.is_text_open:
            self._events.open_text(request, now)
        if is_last:
            ended = End(row.uid, FinishCode.STOP if row.outputs == VECTOR else FinishCode.LENGTH)
        if ended is not None:
            self.requests.end(request, ended)
            return None if is_last else num_taken
        if is_complete:
            return None
        if len(request.token_ids) >= request.next_limit:
            self._restart_long(request)
        else:
            request.count_forced()
        return None

    def _note_weights(self, flight: PlanInFlight, tokens: TokenColumns, with_new_weights: set[int]) -> None:
        """Report the version of the weights with the first token of each request since they were replaced."""
        num_output = {request.uid: request.num_output for request in flight.requests}
        version = self._events.weight_version.encode()
        for uid, new in zip(tokens.uids, tokens.rows(), strict=True):
            if uid in with_new_weights and (isinstance(new, int) or new):
                first = num_output[uid] - (1 if isinstance(new, int) else len(new))
                tokens.extras.append(Extra(uid, first, WEIGHT_VERSION, version))
                self.requests.with_new_weights.discard(uid)

    def _note_drafts(self, row: Row, request: Request, result: StepResult) -> None:
        """Count the drafts of a row, and report them with the first token of the row."""
        request.num_drafts -= row.num_drafts
        num_proposed = result.num_proposed.get(row.uid, 0)
        num_accepted = row.num_drafts - result.num_rejected.get(row.uid, 0)
        assert request.acceptance is not None
        num_tried = request.acceptance.note(num_proposed, num_accepted)
        if num_tried:
            assert self._draft_costs is not None
            self._draft_costs.note_drafts(num_tried, num_accepted)
            self._events.totals.num_proposed_drafts += num_proposed
            self._events.totals.num_accepted_drafts += num_accepted
            result.tokens.extras.append(draft_extra(row.uid, request.num_output, num_proposed, num_accepted))

    def _restart_long(self, request: Request) -> None:
        """Recompute a running request without rows in flight from position 0, now with long RoPE factors."""
        request.next_limit = request.max_tokens
        self.requests.requeue([request.uid])

    def fail(self, plan: StepPlan, message: str) -> None:
        """End the requests of the oldest or newest plan in flight, which has no result. Other requests continue.

        If a launch failed, it is unknown which parts of the plan the runner has processed. So uids closed by the plan
        are closed again, and new requests without a row in it are admitted again.
        """
        is_newest = self._flights[-1].plan is plan
        flight = self._flights.pop() if is_newest else self._flights.popleft()
        for request, allocation in zip(flight.requests, flight.allocations, strict=True):
            if request.allocation is allocation:
                self.requests.end(request, End(request.uid, FinishCode.FAILED, stage="forward", message=message))
        if is_newest:
            self.requests.closed = plan.closed + self.requests.closed
            running = {request.uid for request in self.requests.running}
            self.requests.requeue(new.uid for new in plan.new_rows if new.uid in running)

    # ------------------------------------------------------------ figures

    def stats(self, now: float) -> Stats:
        """Return the current counters, with ``now`` as their time."""
        requests, cache = self.requests, self.cache
        return Stats(
            **asdict(self._events.totals),
            sent_at=now,
            num_running=len(requests.running),
            num_waiting=len(requests.waiting) + len(requests.gated),
            num_pages=cache.num_pages,
            num_free_pages=cache.num_allocatable,
            num_cached_pages=cache.num_cached,
            num_pinned_pages=cache.num_pinned,
            step_ended_at=self._applied_at,
        )


def _by_row(flight: PlanInFlight, result: StepResult) -> tuple[list[int], dict[int, list[int]]]:
    """Return the token of each row (-1 if it does not have exactly one), and the tokens of these other rows by uid.

    A row has an entry by uid if it has its planned output: no or several tokens, a vector, or a distribution. A row
    with drafts, or with rejected drafts before it, has an entry even if it has one token.
    """
    if result.tokens.counts is None and not (flight.num_drafts or flight.rejected or result.failed):
        tokens = iter(result.tokens.token_ids)
        return [next(tokens) if row.outputs else -1 for row in flight.plan.rows], {}
    others: dict[int, list[int]] = {}
    row_tokens: list[int] = []
    with_extra = {extra.uid for extra in result.tokens.extras if extra.kind in (POOLED_VECTOR, NEXT_LOGPROBS)}
    rows = iter(result.tokens.rows())
    for row in flight.plan.rows:
        new = next(rows) if row.outputs else []
        ids = [new] if isinstance(new, int) else new
        is_single = len(ids) == 1 and not row.num_drafts and row.uid not in flight.rejected
        row_tokens.append(ids[0] if is_single and row.uid not in result.failed else -1)
        if not is_single and (row.outputs == TOKENS or row.uid in with_extra):
            others[row.uid] = ids
    return row_tokens, others
