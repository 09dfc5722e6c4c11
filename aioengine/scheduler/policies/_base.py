"""Policy: the interface of the files in ``policies/``, and their shared functions.

The queue is sorted by ``key``, which must not depend on the current time. Ageing is expressed as a head start: a
request of priority p sorts like a request of priority 0 that arrived p head starts earlier. So a request that has
waited long enough is first, and no request starves. Priority orders the queue only. A running request is not stopped
for a waiting one, but if pages run out, the lowest priority is preempted first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aioengine.scheduler.request import Request

SAME_TIME_S = 10.0
"""Requests of one priority that arrived in the same interval of this length count as arrived together."""

NumCached = Callable[["Request"], int]


class Policy(Protocol):
    """The order in which requests are admitted."""

    def key(self, request: Request) -> tuple[float, ...]:
        """Return the sort key of a request in the queue. Equal keys are ordered by submission."""
        ...

    def candidates(self, waiting: Sequence[Request], num_cached: NumCached) -> Iterable[Request]:
        """Return the waiting requests in the order in which this step tries to admit them.

        waiting: sorted by ``key``. num_cached: returns the cached tokens of a request; it costs a cache lookup.
        The first request that does not fit ends the admissions of the step, so no request is passed over forever.
        """
        ...


def head_start_key(request: Request, seconds: float) -> float:
    """Return the arrival time minus ``seconds`` for each level of priority."""
    return request.submit.arrived_at - seconds * request.submit.priority


def queue_key(request: Request, head_start_s: float) -> tuple[float, ...]:
    """Order by aged arrival in steps of ``SAME_TIME_S``, then priority, then nearest deadline, then aged arrival."""
    arrival = head_start_key(request, head_start_s)
    return arrival // SAME_TIME_S, -request.submit.priority, nearest_deadline(request), arrival


def nearest_deadline(request: Request) -> float:
    """Return the earliest deadline of a request; infinity if it has none."""
    return min(request.submit.limits.deadlines().values(), default=math.inf)
