"""The most of the prompt in the prefix cache goes first, among requests that arrived at about the same time.

Good where many conversations compete for a cache that cannot hold them all. Requests that arrived in the same ten
seconds (a level of priority counting as ten seconds, as in ``fcfs``) are equals; none is overtaken by one
that arrived later than that, so nothing starves.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING

from aioengine.scheduler.policies._base import SAME_TIME_S, NumCached, head_start_key, queue_key
from aioengine.scheduler.policies.fcfs import HEAD_START_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aioengine.scheduler.request import Request

WINDOW = 32  # requests looked at in a step; each costs a look into the cache


class LongestPrefixPolicy:
    """By arrival in steps of ten seconds, then by cached tokens; by arrival alone beyond the window."""

    def key(self, request: Request) -> tuple[float, ...]:
        return queue_key(request, HEAD_START_S)

    def candidates(self, waiting: Sequence[Request], num_cached: NumCached) -> Iterable[Request]:
        def place(request: Request) -> tuple[float, int]:
            return head_start_key(request, HEAD_START_S) // SAME_TIME_S, -num_cached(request)

        return chain(sorted(waiting[:WINDOW], key=place), islice(waiting, WINDOW, None))


PLUGIN = LongestPrefixPolicy
