"""Policies: the order of the waiting requests.

The queue is sorted by ``key``, which must not depend on the current time. A request of priority p counts as if it had
arrived p head starts (``head_start_s``) earlier. So a request that has waited long enough is first, and no request
starves. Priority orders the queue only. A running request is not stopped for a waiting one, but if pages run out, the
lowest priority is preempted first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import ClassVar

from aioengine.scheduler.request import Request

SAME_TIME_S = 10.0
"""Requests of one priority that arrived in the same interval of this length count as arrived together."""

WINDOW = 32  # requests that ``longest_prefix`` looks up in a step; each costs a cache lookup

NumCached = Callable[["Request"], int]


class Policy:
    """The policy "fcfs": first come, first served.

    Requests that count as arrived together are ordered by priority, then by their nearest deadline, then by arrival.

    Attributes:
        head_start_s: each level of priority counts as an arrival that is this much earlier.
    """

    head_start_s: ClassVar[float] = 10.0

    def key(self, request: Request) -> tuple[float, ...]:
        """Return the sort key of a request in the queue. Equal keys are ordered by submission."""
        submit = request.submit
        arrival = submit.arrived_at - self.head_start_s * submit.priority
        nearest_deadline = min(submit.limits.deadlines.values(), default=math.inf)
        return arrival // SAME_TIME_S, -submit.priority, nearest_deadline, arrival

    def candidates(self, waiting: Sequence[Request], num_cached: NumCached) -> Iterable[Request]:
        """Return the waiting requests in the order in which this step tries to admit them.

        waiting: sorted by ``key``. num_cached: returns the cached tokens of a request; it costs a cache lookup.
        The first request that does not fit ends the admissions of the step, so no request is passed over forever.
        """
        return waiting


class PriorityPolicy(Policy):
    """The policy "priority": each level counts as an arrival ten minutes earlier."""

    head_start_s = 600.0


class LongestPrefixPolicy(Policy):
    """The policy "longest_prefix": among requests that count as arrived together, the longest cached prefix first.

    Useful if many conversations compete for a cache that is too small for all of them. Only the first ``WINDOW``
    requests are reordered.
    """

    def candidates(self, waiting: Sequence[Request], num_cached: NumCached) -> Iterable[Request]:
        def sort_key(request: Request) -> tuple[float, int]:
            return self.key(request)[0], -num_cached(request)

        return chain(sorted(waiting[:WINDOW], key=sort_key), islice(waiting, WINDOW, None))
