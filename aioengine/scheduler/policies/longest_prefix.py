"""Whoever has most of its prompt in the prefix cache goes first, among the next few in the queue of equal priority.

Good where many conversations compete for a cache that cannot hold them all. The front of the queue can be overtaken
only ``MAX_OVERTAKEN`` times, so nothing starves.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from aioengine.scheduler.policies.fcfs import HEAD_START_S
from aioengine.scheduler.queue_order import NumCached, head_start_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from aioengine.scheduler.request import Request

WINDOW = 32  # requests looked at in a step; each costs a look into the cache
MAX_OVERTAKEN = 64  # steps


class LongestPrefixPolicy:
    """By cached tokens within a window, by arrival beyond it."""

    def __init__(self) -> None:
        self._front_uid = -1
        self._num_overtaken = 0

    def key(self, request: Request) -> tuple[float, ...]:
        return (head_start_key(request, HEAD_START_S),)

    def candidates(self, waiting: Sequence[Request], num_cached: NumCached) -> Iterable[Request]:
        front = waiting[0]
        if front.uid != self._front_uid:
            self._front_uid, self._num_overtaken = front.uid, 0
        self._num_overtaken += 1
        if self._num_overtaken > MAX_OVERTAKEN:
            return waiting
        return self._by_cached(waiting, num_cached)

    def _by_cached(self, waiting: Sequence[Request], num_cached: NumCached) -> Iterator[Request]:
        yield from sorted(waiting[:WINDOW], key=lambda request: (-request.submit.priority, -num_cached(request)))
        yield from islice(waiting, WINDOW, None)


PLUGIN = LongestPrefixPolicy
