"""Admission: how much a step computes, whether a waiting request can begin now, and whom to preempt.

A step computes up to ``chunk_tokens``. Decode rows come first, all of them in every step. Each reads its whole past,
so it may count as more than the one token that it computes; else those rows would wait longer for a step the more of
them there are. The prompts share the rest, in turn: one that can be finished takes what it needs, any other one half of
what is left, and the remainder goes to them in the same order. So a long prompt moves on in every step, a short one
that arrives behind it need not wait for its end, and the tokens of the step are used up.

The running requests stand in one order, their ``rank``: higher priority first, then the older. When pages run out the
last of them is preempted, so the first always gets to its end. Its computed pages stay in the prefix cache while there
is room, and it returns to its old place in the queue.

Against thrashing, a request is admitted only when every running one, and the new one, then has pages for some more
steps (or for all that it can still need). So no request is preempted within that many steps after an admission, and a
request that comes back gets at least so far.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aioengine.memory.prefix_cache import Match, PrefixCache
    from aioengine.scheduler.request import Request

MAX_PARTIAL = 4  # prompts computed in part at a time; shorter ones, which end in this step, may pass
LEAST_SHARE = 16  # tokens; a smaller part of a prompt is not worth a row of its own
STEPS_AHEAD = 16  # for a request that runs for the first time
STEPS_AHEAD_AGAIN = 32  # for one that was preempted before


class Refusal(Enum):
    """LATER: it waits for a prefix, or its turn has not come; others may pass. FULL: pages are short, nobody may."""

    LATER = 0
    FULL = 1


class Admission:
    """The questions asked before a request is let in."""

    __slots__ = ("_cache", "_chunk_tokens")

    def __init__(self, cache: PrefixCache, chunk_tokens: int) -> None:
        self._cache = cache
        self._chunk_tokens = chunk_tokens

    def ask(self, request: Request, running: Sequence[Request], *, left: int, num_partial: int) -> Match | Refusal:
        """What is computed of the request if it can be let in, else why not.

        left: tokens left in this step. num_partial: prompts that are computed in part.
        """
        if num_partial >= MAX_PARTIAL and request.num_tokens > left:
            return Refusal.LATER
        match = self._cache.match(request.token_ids)
        request.wait_for(match.pending)
        if match.pending is not None:
            return Refusal.LATER
        return match if self._fits(request, match, running) else Refusal.FULL

    def _fits(self, request: Request, match: Match, running: Sequence[Request]) -> bool:
        cache = self._cache
        left = cache.num_available(match) - cache.pages_for(request.num_tokens) + len(match.path)
        if left < 0:
            return False
        if not running:
            return True
        num_missing = request.num_tokens - len(match.path) * cache.page_size
        steps = reserve_for(request, num_missing, self._chunk_tokens)
        if left >= cache.pages_for(steps) * (len(running) + 1):
            return True
        return left >= pages_ahead((*running, request), steps, cache)


class TokenBudget:
    """The tokens of one step that are left for prompts."""

    __slots__ = ("left",)

    def __init__(self, chunk_tokens: int, decode_tokens: int) -> None:
        self.left = max(chunk_tokens - decode_tokens, chunk_tokens // 8, 1)

    def take_share(self, wanted: int) -> int:
        """All that is wanted if there is so much, else half of what is left."""
        return self._take(wanted if wanted <= self.left else max(self.left // 2, LEAST_SHARE))

    def take_rest(self, wanted: int) -> int:
        """Up to all that is left."""
        return self._take(wanted)

    def _take(self, wanted: int) -> int:
        taken = min(wanted, self.left)
        self.left -= taken
        return taken


def reserve_for(request: Request, num_missing: int, chunk_tokens: int) -> int:
    """How many steps ahead everybody must have pages for, once ``request`` is let in."""
    steps = STEPS_AHEAD_AGAIN if request.marks.num_preemptions else STEPS_AHEAD
    return steps + 2 * num_missing // chunk_tokens


def pages_ahead(requests: Iterable[Request], steps: int, cache: PrefixCache) -> int:
    """The pages that these requests may take within ``steps``, beyond those for the tokens that they have."""
    most = cache.pages_for(steps)
    pages_for = cache.pages_for
    return sum(min(most, pages_for(request.max_tokens) - pages_for(request.num_tokens)) for request in requests)
