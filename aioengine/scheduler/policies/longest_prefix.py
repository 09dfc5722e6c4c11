"""Longest cached prefix first, among requests that arrived at about the same time.

Useful if many conversations compete for a cache that is too small for all of them. Only requests that arrived in the
same ten seconds are reordered (each level of priority counts as ten seconds, as in ``fcfs``), so no request starves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice

from aioengine.scheduler.policies._base import NumCached, Policy
from aioengine.scheduler.request import Request

WINDOW = 32  # requests looked up in a step; each costs a cache lookup


class LongestPrefixPolicy(Policy):
    """Order by arrival in steps of ten seconds, then by cached tokens. After ``WINDOW`` requests by arrival only."""

    def candidates(self, waiting: Sequence[Request], num_cached: NumCached) -> Iterable[Request]:
        def sort_key(request: Request) -> tuple[float, int]:
            return self.key(request)[0], -num_cached(request)

        return chain(sorted(waiting[:WINDOW], key=sort_key), islice(waiting, WINDOW, None))


PLUGIN = LongestPrefixPolicy
