"""Admission: whether a waiting request can begin now. It asks and changes nothing."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from aioengine.scheduler.preemption import pages_ahead, reserve_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioengine.memory.prefix_cache import Match, PrefixCache
    from aioengine.scheduler.request import Request

MAX_PARTIAL = 4  # prompts computed in part at a time; shorter ones, which end in this step, may pass


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
