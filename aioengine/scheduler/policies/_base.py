"""Policy: the interface of ``policies/``, and what its files share.

The queue is kept sorted by ``key``, which must not depend on time: ageing is written as a head start instead. A
request of priority p that arrived at t sorts like one of priority 0 that arrived ``p`` head starts earlier. So a
request that has waited long enough is overtaken by no other, and nothing starves. While a request waits, its priority
only orders the queue; no running request is stopped for it, but when pages run out the lowest priority is preempted
first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aioengine.scheduler.request import Request

SAME_TIME_S = 10.0
"""Requests of one priority that arrived in the same interval of this length are equals."""

NumCached = Callable[["Request"], int]


class Policy(Protocol):
    """The order in which to admit requests; whether one fits is decided elsewhere."""

    def key(self, request: Request) -> tuple[float, ...]:
        """Where a request stands in the queue; smaller is sooner. Equal keys stand in the order of submission."""
        ...

    def candidates(self, waiting: Sequence[Request], num_cached: NumCached) -> Iterable[Request]:
        """The waiting requests, sorted by ``key``, in the order in which this step admits them.

        ``num_cached`` returns how many tokens of a request the prefix cache has now; it costs a look into the cache.
        The first request that does not fit ends the admissions of the step, so none is passed over for ever.
        """
        ...


def head_start_key(request: Request, seconds: float) -> float:
    """Arrival, made earlier by ``seconds`` for each level of priority."""
    return request.submit.arrived_at - seconds * request.submit.priority


def queue_key(request: Request, head_start_s: float) -> tuple[float, ...]:
    """By priority, aged, in steps of ``SAME_TIME_S``; among equals by the nearest deadline, then by arrival."""
    place = head_start_key(request, head_start_s)
    return place // SAME_TIME_S, -request.submit.priority, nearest_deadline(request), place


def nearest_deadline(request: Request) -> float:
    """The first time by which something must have happened to it."""
    return min(request.submit.limits.deadlines().values(), default=math.inf)
