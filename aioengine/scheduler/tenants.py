"""Tenants: who has had how much, so that all get their share whatever each of them asks for. Pure.

Every tenant has a virtual time: the tokens that it was given, divided by its weight. Of those that wait, the one with
the least goes next. A request is charged when it is let in, for its prompt and all the output that it may give; what it
did not use is given back at its end. Who was away is lifted to the least time of those that were not: rest is not saved
up. Priorities and deadlines order the requests of one tenant; between tenants the weights alone decide.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from aioengine.scheduler.request import Request

DEFAULT_WEIGHT = 1.0
MAX_AWAY = (
    1024  # tenants without requests whose times are kept; beyond it those that were the least ahead are forgotten
)


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
        """The tenant was given so many tokens (or did not use so many, where the number is negative)."""
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
