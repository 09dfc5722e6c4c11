"""Lifecycle: the living requests, and every change of state that one of them can go through.

submit ──> WAITING ── admit ──> RUNNING ── end ──> ENDED
              ^  │                 │
              │  └── end ──> ENDED │
              └──── preempt ───────┘
A request with a closed gate leaves the queue and is GATED until the gate opens. A running one stays RUNNING, unless it
is preempted or the gate does not keep pages; then it is GATED too.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import TYPE_CHECKING

from aioengine import plugins
from aioengine.memory.prefix_cache import PrefixCache
from aioengine.protocol.messages import FinishCode
from aioengine.scheduler.forecast import Pace, refusal_of_late
from aioengine.scheduler.gates import Gate
from aioengine.scheduler.outbox import Outbox
from aioengine.scheduler.queue import Deadlines, Tenants
from aioengine.scheduler.request import Request, State
from aioengine.scheduler.stopping import Finish, num_wanted, refusal_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aioengine.config import SchedulerSettings
    from aioengine.memory.prefix_cache import Match
    from aioengine.protocol.messages import Submit
    from aioengine.scheduler.policies._base import Policy

_order = attrgetter("order")
_rank = attrgetter("rank")


class UidInUseError(ValueError):
    """A request with this uid is alive."""


class Lifecycle:
    """Keeps the queue and the running requests, and their pages.

    waiting: the queue, sorted by ``order``. running: sorted by ``rank``. gated: by uid, those beside the queue. All
    three are for reading.
    is_stalled: nothing can be computed until a gate opens or a request comes or goes; set by ``Scheduler.schedule``.
    closed: uids that the runner knows and need not know any more, for the next plan.
    """

    def __init__(self, settings: SchedulerSettings, *, num_pages: int, page_size: int) -> None:
        self.cache = PrefixCache(num_pages=num_pages, page_size=page_size, enabled=settings.prefix_cache)
        self.outbox = Outbox()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.gated: dict[int, Request] = {}
        self.is_stalled = False
        self.closed: list[int] = []
        self._tenants = Tenants(settings.tenant_weights)
        self.pace = Pace(settings.chunk_tokens)
        self._context_length = settings.context_length
        self._max_running = settings.max_running
        self._policy: Policy = plugins.load("scheduler/policies", settings.policy)()
        self._deadlines = Deadlines()
        self._requests: dict[int, Request] = {}
        self._num_submitted = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request waits in the queue or runs, or none of them can go on for now."""
        return self.is_stalled or not (self.waiting or self.running)

    def candidates(self) -> Iterable[Request]:
        """The waiting requests as of now, in the order in which they are to be asked; whom to ask next may depend on
        who was admitted before.
        """
        return self._tenants.in_turn(list(self._policy.candidates(self.waiting, self._num_cached)))

    def submit(self, submit: Submit, now: float) -> None:
        """Queue a request; one that can never run is ended at once, and so is one that is late and asked for that.

        Raises ValueError for a uid that is alive.
        """
        if submit.uid in self._requests:
            raise UidInUseError(f"uid {submit.uid} was submitted twice; a uid is unique for the life of the engine")
        pool_tokens = self.cache.num_pages * self.cache.page_size
        refusal = refusal_of(submit, context_length=self._context_length, pool_tokens=pool_tokens)
        if refusal is not None:
            self.outbox.end(submit.uid, refusal)
            return
        self._num_submitted += 1
        max_tokens = min(num_wanted(submit), self._context_length, pool_tokens)
        request = Request(submit, number=self._num_submitted, max_tokens=max_tokens)
        request.order = (*self._policy.key(request), self._num_submitted)
        if submit.limits.refuses_late and (late := self._refusal_of_late(request, now)) is not None:
            self.outbox.end(submit.uid, late)
            return
        self._requests[request.uid] = request
        self._tenants.enter(submit.tenant)
        insort(self.waiting, request, key=_order)
        self.is_stalled = False
        self._deadlines.add(request.uid, submit.limits)
        if submit.resumed is not None:
            self.outbox.resume(request, submit.resumed)

    def living(self, uids: Iterable[int]) -> list[Request]:
        """Those of these that are alive, each once."""
        return [self._requests[uid] for uid in dict.fromkeys(uids) if uid in self._requests]

    def abort(self, uids: Iterable[int] | None, code: FinishCode, message: str) -> None:
        """End requests from outside. Unknown uids have just ended; of a stop string the frontend knows already.

        None: forget all, and what nobody was told yet; what was computed is still cached.
        """
        if uids is None:
            for request in list(self._requests.values()):
                self.end(request, None)
            self._deadlines = Deadlines()
            self.outbox.clear()
            return
        finish = Finish(code, stage="detokenize" if code is FinishCode.FAILED else "", message=message)
        for request in self.living(uids):
            self.end(request, finish, silently=code is FinishCode.STOP)

    def expire(self, now: float) -> None:
        """End the requests whose deadline has passed."""
        for request, kind in self._deadlines.take_expired(now, self._requests):
            self.end(request, Finish(FinishCode.DEADLINE, kind))
        self._deadlines.sweep(self._requests)

    def next_deadline(self) -> float | None:
        """When the next deadline passes, or None."""
        return self._deadlines.next_time(self._requests)

    def admit(self, request: Request, match: Match, now: float) -> None:
        """Let a waiting request run on the pages of ``match`` and as many new ones as its tokens need."""
        hold = self.cache.lock(request.token_ids, match)
        num_cached = len(match.path) * self.cache.page_size
        del self.waiting[bisect_left(self.waiting, request.order, key=_order)]
        request.start(hold, num_cached)
        insort(self.running, request, key=_rank)
        self.pace.note_admission(now, is_waited=bool(self.waiting))
        if not request.marks.num_charged:
            request.marks.num_charged = request.max_tokens
            self._tenants.charge(request.submit.tenant, request.marks.num_charged)
        if request.marks.admitted_at is None:
            request.marks.admitted_at = now
            request.marks.num_cached = num_cached

    def preempt(self) -> Request:
        """Take the pages of the last running request and put it back into the queue, or beside it; returns it."""
        request = self.running[-1]
        self._let_wait(request)
        self.outbox.preempt(request)
        return request

    def close_gate(self, request: Request, gate: Gate) -> None:
        """Compute nothing more of it in new steps; its rows in flight are not late if it keeps its pages.

        Pages that it does not keep stay in the prefix cache while there is room.
        """
        request.close_gate(gate)
        if request.state is State.WAITING or not (request.state is State.GATED or gate.keeps_pages):
            self._let_wait(request)

    def open_gate(self, request: Request, gate: Gate) -> None:
        """Go on with it, unless another gate is closed."""
        request.open_gate(gate)
        self.is_stalled = False
        if request.state is State.GATED:
            self._let_wait(request)

    def end(self, request: Request, finish: Finish | None, *, silently: bool = False, is_spoilt: bool = False) -> None:
        """A request is over, whatever its state. Its pages are free at once; its rows in flight are late.

        finish: None where it was only forgotten, which counts nowhere.

        is_spoilt: what it computed is wrong and must not be found by others.
        """
        del self._requests[request.uid]
        if request.marks.num_charged:
            self._tenants.charge(request.submit.tenant, len(request.token_ids) - request.marks.num_charged)
        self._tenants.leave(request.submit.tenant)
        self._take_out(request, State.ENDED, is_spoilt=is_spoilt)
        if finish is not None:
            self.outbox.end(request.uid, finish, silently=silently)

    def _let_wait(self, request: Request) -> None:
        """Move it into the queue, or beside it while a gate is closed."""
        is_gated = bool(request.gates - {Gate.PREFIX})
        self._take_out(request, State.GATED if is_gated else State.WAITING)
        if is_gated:
            self.gated[request.uid] = request
        else:
            insort(self.waiting, request, key=_order)

    def _take_out(self, request: Request, state: State, *, is_spoilt: bool = False) -> None:
        """Out of the list in which it stands now."""
        self.is_stalled = False
        if request.state is State.RUNNING:
            del self.running[bisect_left(self.running, request.rank, key=_rank)]
            self.cache.unlock(request.hold, is_spoilt=is_spoilt)
            self.closed.append(request.uid)
        elif request.state is State.GATED:
            del self.gated[request.uid]
        else:
            del self.waiting[bisect_left(self.waiting, request.order, key=_order)]
        request.stop(state)

    def _refusal_of_late(self, request: Request, now: float) -> Finish | None:
        num_free = self._max_running - len(self.running)
        ahead = self.waiting[: bisect_left(self.waiting, request.order, key=_order)]
        num_ahead = sum(one.submit.tenant == request.submit.tenant for one in ahead) + 1 - num_free
        of_running = sum(one.num_missing for one in self.running)
        num_missing = request.num_prompt - self._num_cached(request) + of_running
        return refusal_of_late(request.submit, self.pace, now, num_ahead=max(0, num_ahead), num_missing=num_missing)

    def _num_cached(self, request: Request) -> int:
        return len(self.cache.match(request.token_ids).path) * self.cache.page_size
