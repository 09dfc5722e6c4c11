"""When pages run out: whom to preempt, and how much must be free before anybody is let in (again).

The running requests stand in one order, their ``rank``: higher priority first, then the older. The last of them is
preempted, so the first always gets to its end. Its computed pages stay in the prefix cache while there is room, and it
returns to its old place in the queue.

Against thrashing, a request is let in only when every running one, the new one too, then has pages for some more steps
(or for all that it can still need). So nobody is preempted within that many steps after an admission, and a request
that comes back gets at least so far.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aioengine.memory.prefix_cache import PrefixCache
    from aioengine.scheduler.request import Request

STEPS_AHEAD = 16  # for a request that runs for the first time
STEPS_AHEAD_AGAIN = 32  # for one that was preempted before

_rank = attrgetter("rank")


def add_running(running: list[Request], request: Request) -> None:
    """Put a request into the list of the running ones, which is sorted by rank."""
    insort(running, request, key=_rank)


def remove_running(running: list[Request], request: Request) -> None:
    """Take a request out of that list."""
    del running[bisect_left(running, request.rank, key=_rank)]


def next_victim(running: list[Request]) -> Request:
    """The request that is preempted next."""
    return running[-1]


def reserve_for(request: Request, num_missing: int, chunk_tokens: int) -> int:
    """How many steps ahead everybody must have pages for, once ``request`` is let in."""
    steps = STEPS_AHEAD_AGAIN if request.marks.num_preemptions else STEPS_AHEAD
    return steps + 2 * num_missing // chunk_tokens


def pages_ahead(requests: Iterable[Request], steps: int, cache: PrefixCache) -> int:
    """The pages that these requests may take within ``steps``, beyond those for the tokens that they have."""
    most = cache.pages_for(steps)
    pages_for = cache.pages_for
    return sum(min(most, pages_for(request.max_tokens) - pages_for(request.num_tokens)) for request in requests)
