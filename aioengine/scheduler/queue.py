"""What the queue keeps beside its order: how much each tenant has had, and when which request is out of time.

Every tenant has a virtual time: the tokens that it was given, divided by its weight. The waiting tenant with the least
goes next, so that all get their share however much each of them asks for. A request is charged when it is admitted, for
its prompt and all the output that it may give; unused tokens are given back at its end. A tenant that was away is
lifted to the least time of those that were not, so rest is not saved up. Priorities and deadlines order the requests of
one tenant; between tenants the weights alone decide.

Deadlines stand in a heap, so looking for expired ones costs nothing while there are none.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from aioengine.protocol.messages import Limits
    from aioengine.scheduler.request import Request

DEFAULT_WEIGHT = 1.0
MAX_AWAY = 1024  # tenants without requests whose times are kept; beyond it those least ahead are forgotten
SPARE_ENTRIES = 256  # deadlines of ended requests that are kept at most before they are swept


class Tenants:
    """The virtual times of the tenants that have requests, and of those that are ahead of them."""

    __slots__ = ("_away", "_num_requests", "_times", "_weights")

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._times: dict[str, float] = {}
        self._num_requests: dict[str, int] = {}
        self._away: list[tuple[float, str]] = []  # a heap, also of some that have come back

    @property
    def num_known(self) -> int:
        """Tenants whose time is kept."""
        return len(self._times)

    def time_of(self, tenant: str) -> float:
        """Its virtual time."""
        return self._times.get(tenant, 0.0)

    def enter(self, tenant: str) -> None:
        """A request of the tenant has come."""
        count = self._num_requests.get(tenant, 0)
        if count == 0:
            least = min((self._times[other] for other in self._num_requests), default=0.0)
            self._times[tenant] = max(self._times.get(tenant, 0.0), least)
        self._num_requests[tenant] = count + 1

    def leave(self, tenant: str) -> None:
        """A request of the tenant is over."""
        self._num_requests[tenant] -= 1
        if self._num_requests[tenant]:
            return
        del self._num_requests[tenant]
        heapq.heappush(self._away, (self._times[tenant], tenant))
        least = min((self._times[other] for other in self._num_requests), default=math.inf)
        while self._away and (self._away[0][0] <= least or len(self._away) > MAX_AWAY):
            time, other = heapq.heappop(self._away)
            if other not in self._num_requests and self._times.get(other) == time:
                del self._times[other]

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Add ``num_tokens`` that the tenant was given (negative: that it did not use)."""
        self._times[tenant] += num_tokens / self._weights.get(tenant, DEFAULT_WEIGHT)

    def in_turn(self, requests: Iterable[Request]) -> Iterator[Request]:
        """The requests of each tenant in the order given, the tenants in turn; what is charged in between counts."""
        if len(self._times) < 2:
            yield from requests
            return
        lines: dict[str, deque[Request]] = {}
        for request in requests:
            lines.setdefault(request.submit.tenant, deque()).append(request)
        while lines:
            tenant = min(lines, key=self._times.__getitem__)
            yield lines[tenant].popleft()
            if not lines[tenant]:
                del lines[tenant]


class Deadlines:
    """The deadlines of the living requests; entries of ended ones are skipped, and swept when they are many."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []

    def add(self, uid: int, limits: Limits) -> None:
        for kind, time in limits.deadlines().items():
            heapq.heappush(self._heap, (time, uid, kind))

    def next_time(self, requests: dict[int, Request]) -> float | None:
        """When the next deadline of a living request passes; None: there is none."""
        heap = self._heap
        while heap and not _applies(requests.get(heap[0][1]), heap[0][2]):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def take_expired(self, now: float, requests: dict[int, Request]) -> list[tuple[Request, str]]:
        """The requests with an expired deadline, each once, and which deadline it was."""
        expired: dict[int, tuple[Request, str]] = {}
        heap = self._heap
        while heap and heap[0][0] <= now:
            _, uid, kind = heapq.heappop(heap)
            request = requests.get(uid)
            if request is not None and _applies(request, kind):
                expired.setdefault(uid, (request, kind))
        return list(expired.values())

    def sweep(self, living: Collection[int]) -> None:
        """Forget the entries of ended requests, once they are the greater part."""
        if len(self._heap) > 4 * len(living) + SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[1] in living]
            heapq.heapify(self._heap)


def _applies(request: Request | None, kind: str) -> bool:
    if request is None:
        return False
    if kind == "queue":
        return request.history.admitted_at is None
    return kind == "total" or not request.history.is_text_open
