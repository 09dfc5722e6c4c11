"""Requests: all requests that have not ended, and every change of their state.

from      to        when
(new)     WAITING   it is submitted
WAITING   RUNNING   it is admitted
RUNNING   WAITING   it is preempted, or must be recomputed
WAITING   GATED     a gate other than PREFIX closes
RUNNING   GATED     the gate SUSPENDED closes, or it is preempted while a gate is closed
GATED     WAITING   all gates are open; it returns to its old position in the queue
any       ENDED     it ends
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import attrgetter

from aioengine import plugins
from aioengine.memory.adapter_slots import AdapterSlots, Waiter
from aioengine.memory.prefix_cache import Match, PrefixCache
from aioengine.protocol.columns import TokenColumns
from aioengine.protocol.messages import (
    DEFAULT_WEIGHT_VERSION,
    Adapter,
    Continuation,
    End,
    FinishCode,
    FirstToken,
    RequestKind,
    StepOutput,
    Submit,
    TextOpened,
    Totals,
)
from aioengine.scheduler.admission import TimeEstimates, refusal_of_late
from aioengine.scheduler.deadlines import Deadlines
from aioengine.scheduler.policies._base import Policy
from aioengine.scheduler.request import Gate, Request, State, refusal_of
from aioengine.scheduler.tenants import Tenants
from aioengine.settings.config import SchedulerSettings

ANSWERED_CODES = (FinishCode.STOP, FinishCode.LENGTH)
FINISHED_CODES = (FinishCode.STOP, FinishCode.LENGTH, FinishCode.DEADLINE)


class StepEvents:
    """Collects events until ``take``.

    Attributes:
        totals: counters. weight_version: version of the runner's weights, which each first token reports.
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self.weight_version = DEFAULT_WEIGHT_VERSION
        self._opened: list[TextOpened] = []
        self._preempted: list[int] = []
        self._ended: list[End] = []

    @property
    def has_events(self) -> bool:
        """Whether there are events to send even without the result of a step."""
        return bool(self._ended or self._preempted)

    def open_text(self, request: Request, now: float) -> None:
        """Record the first token. Earlier preemptions are sent now, because the detokenizer needs the text first."""
        request.is_text_open = True
        admitted_at = request.admitted_at or now
        first_token = FirstToken(request.uid, request.num_cached, admitted_at, now, self.weight_version)
        self._opened.append(TextOpened(first_token, request.submit.text))
        self._preempted += [request.uid] * request.num_preemptions
        self.totals.prompt_tokens += request.num_prompt
        self.totals.cached_tokens += request.num_cached

    def reopen_text(self, request: Request, continuation: Continuation) -> None:
        """Record a request that had its first token before a process was replaced."""
        first_token = continuation.first_token
        request.is_text_open = True
        request.admitted_at, request.num_cached = first_token.admitted_at, first_token.num_cached
        opened = TextOpened(first_token, request.submit.text, continuation.token_ids, continuation.num_preemptions)
        self._opened.append(opened)

    def preempt(self, request: Request) -> None:
        request.num_preemptions += 1
        self.totals.num_preemptions += 1
        if request.is_text_open:
            self._preempted.append(request.uid)

    def end(self, end: End, *, is_known: bool = False) -> None:
        """Record the end of a request. is_known: the frontend already knows; only the totals change."""
        if end.code in FINISHED_CODES:
            self.totals.num_finished += 1
        else:
            self.totals.num_aborted += 1
        if not is_known:
            self._ended.append(end)

    def take(self, tokens: TokenColumns | None = None) -> StepOutput:
        """Return the tokens of a step, if any, with all collected events."""
        output = StepOutput(tokens or TokenColumns(), self._opened, self._preempted, self._ended)
        self._opened, self._preempted, self._ended = [], [], []
        return output


_order = attrgetter("order")
_running_order = attrgetter("running_order")


class Requests:
    """The queue, the running requests, and their pages.

    Attributes:
        waiting: the queue, sorted by ``order``. running: sorted by ``running_order``. gated: by uid, the requests
            outside the queue. Read-only for callers.
        is_blocked: nothing can be computed until a gate opens, or a request is added or ends. Set by
            ``Scheduler.schedule``.
        closed: uids for ``StepPlan.closed``: the runner knows them, and they have ended or lost their pages.
        events: not reported yet. cache: the pages. adapters: the adapter slots. estimates: of step and queue time.
        with_new_weights: uids of requests that had no token since the weights changed. Their next token reports it.
    """

    def __init__(
        self, settings: SchedulerSettings, cache: PrefixCache, *, pool_tokens: int, num_adapter_slots: int
    ) -> None:
        """pool_tokens: number of tokens of the longest request that fits into the pool."""
        self.cache = cache
        self._settings = settings
        self._pool_tokens = pool_tokens
        self.events = StepEvents()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.gated: dict[int, Request] = {}
        self.is_blocked = False
        self.closed: list[int] = []
        self.with_new_weights: set[int] = set()
        self.estimates = TimeEstimates(settings.chunk_tokens)
        self._tenants = Tenants(settings.tenant_weights)
        share = settings.max_running // max(1, num_adapter_slots)
        self.adapters = AdapterSlots(num_adapter_slots, quantum=share, turn=self._tenants.time_of)
        self._policy: Policy = plugins.load("scheduler/policies", settings.policy)()
        self.deadlines = Deadlines()
        self._requests: dict[int, Request] = {}
        self._sessions: set[int] = set()  # sessions whose pages are pinned
        self._num_submitted = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request can be computed now."""
        return self.is_blocked or not (self.waiting or self.running)

    def candidates(self) -> Iterable[Request]:
        """Return the waiting requests in the order of admission. An admission can reorder the requests after it."""
        return self._tenants.in_turn(list(self._policy.candidates(self.waiting, self._num_cached)))

    # ------------------------------------------------------------ from outside

    def submit(self, submit: Submit, now: float = 0.0) -> None:
        """Queue a request. End it at once if it can never run, or if it has ``refuse_late`` and would be late."""
        refusal = refusal_of(submit, context_length=self._settings.context_length, pool_tokens=self._pool_tokens)
        if refusal is not None:
            self.events.end(refusal)
            return
        self._num_submitted += 1
        num_wanted = len(submit.prompt_token_ids)
        if submit.kind is RequestKind.GENERATE:
            num_wanted += submit.limits.max_new_tokens
        max_tokens = min(num_wanted, self._settings.context_length, self._pool_tokens)
        request = Request(
            submit, number=self._num_submitted, max_tokens=max_tokens, short_length=self._settings.short_length
        )
        request.order = (*self._policy.key(request), self._num_submitted)
        if submit.limits.refuses_late and (late := self._refusal_of_late(request, max(now, submit.arrived_at))):
            self.events.end(late)
            return
        if submit.session:
            self._sessions.add(submit.session)
            self.cache.touch(submit.session)
        self._requests[request.uid] = request
        self._tenants.enter(submit.tenant)
        insort(self.waiting, request, key=_order)
        self.is_blocked = False
        if submit.limits.deadlines:
            self.deadlines.add(request.uid, submit.limits.deadlines, self._requests)
        if submit.continuation is not None:
            self.events.reopen_text(request, submit.continuation)
            self.with_new_weights.add(request.uid)  # the weights of its last token are unknown

    def abort(
        self, uids: Iterable[int], code: FinishCode = FinishCode.ABORT, message: str = "", *, stage: str = "detokenize"
    ) -> None:
        """End requests in any state and free their pages at once. Ignores unknown uids.

        STOP comes from the detokenizer, which reports the end to the frontend itself, so no ``End`` is sent.
        stage: where they failed, if ``code`` is FAILED.
        """
        stage = stage if code is FinishCode.FAILED else ""
        for request in self._requests_of(uids):
            self.end(request, End(request.uid, code, stage=stage, message=message), is_known=code is FinishCode.STOP)

    def close_gate(self, uids: Iterable[int], gate: Gate) -> None:
        """Give these requests no row in any later plan until ``open_gate``. Unknown uids are ignored.

        A running request keeps its pages unless ``gate.keeps_pages`` is False. While it keeps them, tokens of its rows
        in flight are accepted. To gate a new request, call this right after ``submit``. The gates of admission are not
        allowed.
        """
        for request in self._requests_of(uids):
            if Gate.ADAPTER in request.gates:  # it does not need a slot now
                self.adapters.leave(request.uid)
                request.open_gate(Gate.ADAPTER)
            request.close_gate(gate)
            if request.state is State.WAITING or not (request.state is State.GATED or gate.keeps_pages):
                self._let_wait(request)

    def open_gate(self, uids: Iterable[int], gate: Gate) -> None:
        """Continue these requests, unless another gate is closed. Ignores unknown uids and open gates."""
        for request in self._requests_of(uids):
            request.open_gate(gate)
            self.is_blocked = False
            if request.state is State.GATED and not request.gates:
                self._let_wait(request)

    def requeue(self, uids: Iterable[int]) -> None:
        """Put these requests back into the queue: their adapters are ready, or they must be recomputed."""
        for request in self._requests_of(uids):
            request.open_gate(Gate.ADAPTER)
            self._let_wait(request)

    def close_session(self, session: int) -> None:
        """Remove the pins of a session. A later request of the session pins pages again."""
        self._sessions.discard(session)
        self.cache.unpin(session)

    def expire(self, now: float) -> None:
        """End the requests whose deadline has passed. ``Scheduler.schedule`` also does this."""
        for request, kind in self.deadlines.take_expired(now, self._requests):
            self.end(request, End(request.uid, FinishCode.DEADLINE, kind))

    def next_deadline(self) -> float | None:
        """Return the time at which ``expire`` must be called, or None if no request has a deadline."""
        return self.deadlines.next_time(self._requests)

    def forget_all(self) -> None:
        """Drop all requests and unreported events. Computed pages stay cached."""
        for request in list(self._requests.values()):
            self.end(request, None)
        self.deadlines = Deadlines()
        self.events.take()

    def preempt_all(self) -> None:
        """Preempt all running requests. Their KV is computed again later."""
        for request in list(self.running):
            self._let_wait(request)
            self.events.preempt(request)

    def change_weights(self, version: str, *, keeps_kv: bool) -> int:
        """Compute the next steps with other weights. Return the number of running requests.

        keeps_kv: the running requests keep their KV. Otherwise they are preempted.
        """
        num_running = len(self.running)
        self.events.weight_version = version
        self.cache.change_weights()
        if not keeps_kv:
            self.preempt_all()
        for request in self._requests.values():
            request.wait_for(None)  # the prefix that it waits for has other weights
            if request.is_text_open:
                self.with_new_weights.add(request.uid)
        self.is_blocked = False
        return num_running

    # ------------------------------------------------------------ from the steps

    def wait_unless_ready(self, request: Request, adapter: Adapter) -> bool:
        """Move a waiting request to the load queue if it may not use its adapter now. Return whether it was moved."""
        key, waiter = key_of(adapter), Waiter(request.uid, request.submit.tenant, request.order)
        if self.adapters.may_use(key, waiter):
            return False
        request.close_gate(Gate.ADAPTER)
        self._let_wait(request)
        self.adapters.wait(key, waiter)
        return True

    def admit(self, request: Request, match: Match, now: float) -> None:
        """Start a waiting request with the pages of ``match`` and new pages for its other tokens."""
        allocation = self.cache.allocate(request.token_ids, match)
        num_cached = len(match.path) * self.cache.page_size
        snapshots = self.cache.snapshots
        if snapshots and allocation.snapshots and request.kind is RequestKind.GENERATE and not request.submit.embeds:
            snapshots.stop_before(allocation.snapshots, num_cached, len(request.token_ids))
        del self.waiting[bisect_left(self.waiting, request.order, key=_order)]
        request.start(allocation, num_cached)
        insort(self.running, request, key=_running_order)
        if request.submit.adapter is not None:
            waiter = Waiter(request.uid, request.submit.tenant, request.order)
            self.adapters.use(key_of(request.submit.adapter), waiter)
        self.estimates.note_admission(now, has_next=bool(self.waiting))
        if not request.num_charged:
            request.num_charged = request.next_limit
            self._tenants.charge(request.submit.tenant, request.num_charged)
        if request.admitted_at is None:
            request.admitted_at = now
            request.num_cached = num_cached

    def preempt(self) -> Request:
        """Release the pages of the last running request, return it to the queue or its gate, and return it."""
        request = self.running[-1]
        self._let_wait(request)
        self.events.preempt(request)
        return request

    def end(self, request: Request, end: End | None, *, is_known: bool = False, is_invalid: bool = False) -> None:
        """End a request in any state. Its pages are free at once; its rows in flight become late.

        end: None to forget the request without an event. is_known: the frontend already knows of the end.
        is_invalid: its KV is wrong and must not be reused by other requests.
        """
        del self._requests[request.uid]
        self.with_new_weights.discard(request.uid)
        session = request.submit.session
        if session in self._sessions and end is not None and end.code in ANSWERED_CODES and not is_invalid:
            self.cache.pin(session, request.allocation)
        if request.num_charged:
            self._tenants.charge(request.submit.tenant, len(request.token_ids) - request.num_charged)
        self._tenants.leave(request.submit.tenant)
        self._take_out(request, State.ENDED, is_invalid=is_invalid)
        if end is not None:
            self.events.end(end, is_known=is_known)

    def _requests_of(self, uids: Iterable[int]) -> list[Request]:
        """Return the requests of these uids that have not ended, each once."""
        return [self._requests[uid] for uid in dict.fromkeys(uids) if uid in self._requests]

    def _let_wait(self, request: Request) -> None:
        """Move a request into the queue, or out of it while a gate is closed."""
        is_gated = bool(request.gates - {Gate.PREFIX})
        self._take_out(request, State.GATED if is_gated else State.WAITING)
        if is_gated:
            self.gated[request.uid] = request
        else:
            insort(self.waiting, request, key=_order)

    def _take_out(self, request: Request, state: State, *, is_invalid: bool = False) -> None:
        """Remove a request from its current list, release its pages and its use of an adapter, and set its state."""
        self.is_blocked = False
        if request.submit.adapter is not None and (request.state is not State.GATED or Gate.ADAPTER in request.gates):
            self.adapters.leave(request.uid)
        if request.state is State.RUNNING:
            del self.running[bisect_left(self.running, request.running_order, key=_running_order)]
            self.cache.release(request.allocation, is_invalid=is_invalid)
            self.closed.append(request.uid)
        elif request.state is State.GATED:
            del self.gated[request.uid]
        else:
            del self.waiting[bisect_left(self.waiting, request.order, key=_order)]
        request.stop(state)

    def _refusal_of_late(self, request: Request, now: float) -> End | None:
        num_free = self._settings.max_running - len(self.running)
        ahead = self.waiting[: bisect_left(self.waiting, request.order, key=_order)]
        num_ahead = sum(other.submit.tenant == request.submit.tenant for other in ahead) + 1 - num_free
        num_running = sum(other.num_missing for other in self.running)
        num_missing = request.num_prompt - self._num_cached(request) + num_running
        return refusal_of_late(
            request.submit, self.estimates, now, num_ahead=max(0, num_ahead), num_missing=num_missing
        )

    def _num_cached(self, request: Request) -> int:
        return len(self.cache.match(request.ids_to_match, request.salt).path) * self.cache.page_size


def key_of(adapter: Adapter) -> tuple[str, str]:
    """Return the key of an adapter slot. Names of the same files share a slot."""
    return adapter.path, adapter.fingerprint
