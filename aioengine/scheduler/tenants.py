"""Fair shares of tenants.

Every tenant has a virtual time: its used tokens divided by its weight. The waiting tenant with the smallest virtual
time is next, so each tenant gets its share however many requests it sends. A request is charged at its admission for
its prompt and its maximum output; unused tokens are refunded at its end. A tenant that returns after a pause starts
with the smallest virtual time of the active tenants, so a pause earns no credit. Priorities and deadlines order the
requests of one tenant; only weights decide between tenants.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from aioengine.scheduler.request import Request

DEFAULT_WEIGHT = 1.0
MAX_AWAY = 1024  # inactive tenants whose times are kept; beyond this number, the smallest times are dropped first


class Tenants:
    """The virtual times of active tenants, and of inactive tenants with a larger time than these."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._times: dict[str, float] = {}
        self._num_requests: dict[str, int] = {}
        self._away: list[tuple[float, str]] = []  # a heap; may contain tenants that are active again

    def time_of(self, tenant: str) -> float:
        """Return the virtual time of a tenant."""
        return self._times.get(tenant, 0.0)

    def enter(self, tenant: str) -> None:
        """Record a new request of a tenant."""
        count = self._num_requests.get(tenant, 0)
        if count == 0:
            least = min(map(self._times.__getitem__, self._num_requests), default=0.0)
            self._times[tenant] = max(self._times.get(tenant, 0.0), least)
        self._num_requests[tenant] = count + 1

    def leave(self, tenant: str) -> None:
        """Record the end of a request of a tenant."""
        self._num_requests[tenant] -= 1
        if self._num_requests[tenant]:
            return
        del self._num_requests[tenant]
        heapq.heappush(self._away, (self._times[tenant], tenant))
        least = min(map(self._times.__getitem__, self._num_requests), default=math.inf)
        while self._away and (self._away[0][0] <= least or len(self._away) > MAX_AWAY):
            time, other = heapq.heappop(self._away)
            if other not in self._num_requests and self._times.get(other) == time:
                del self._times[other]

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Charge a tenant for ``num_tokens``; a negative number is a refund."""
        self._times[tenant] += num_tokens / self._weights.get(tenant, DEFAULT_WEIGHT)

    def in_turn(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Yield the requests, always from the tenant with the smallest virtual time. Charges in between count."""
        if len(self._times) < 2:
            yield from requests
            return
        queues: dict[str, deque[Request]] = {}
        for request in requests:
            queues.setdefault(request.submit.tenant, deque()).append(request)
        while queues:
            tenant = min(queues, key=self._times.__getitem__)
            yield queues[tenant].popleft()
            if not queues[tenant]:
                del queues[tenant]
