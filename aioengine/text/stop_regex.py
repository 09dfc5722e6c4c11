"""RegexSearch searches for stop patterns in a growing text, with a limit on CPU time.

It uses the package ``regex``, which reports partial matches (the end of the text could be the start of a match) and has
a timeout for searches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aioengine.errors import RequestError
from aioengine.text.stop_strings import Hit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aioengine.constraints.patterns import PatternCache, PatternMatch

REGEX_WINDOW: Final = 1024
"""Maximum number of characters that are held back for a partial match."""

REGEX_LOOKBEHIND: Final = 64
"""Characters of returned text that lookbehinds and word boundaries can see."""

PUSH_BUDGET_S: Final = 0.02
"""Limit for all patterns of a request and one piece of text, in CPU time. The texts of other requests wait so long."""

REQUEST_BUDGET_S: Final = 0.1
"""Limit for all patterns of a request and all its text, in CPU time. Each piece adds ``PIECE_BUDGET_S``."""

PIECE_BUDGET_S: Final = 0.001


class RegexSearch:
    """The stop patterns of one request.

    Each piece of text (the text of one token) starts a search in the text that is held back, up to ``REGEX_WINDOW``
    characters. The last ``REGEX_LOOKBEHIND`` returned characters are its context. The match that starts first ends the
    request. Each search treats the text so far as complete, so ``[0-9]+`` matches the first piece with a digit.
    Positions where a pattern cannot match are not tried again.
    """

    def __init__(self, patterns: Sequence[str], cache: PatternCache, clock: Callable[[], float]) -> None:
        """clock: returns the CPU time of this thread. Raises ValueError as ``compile_pattern`` does."""
        self._patterns = tuple(patterns)
        self._cache = cache
        self._clock = clock
        # for each pattern, the first position in the held back text where it may match
        self._starts = [0] * len(self._patterns)
        self._before = ""
        self._num_pieces = 0  # pieces of text that were searched
        self._used_s = 0.0  # CPU time of the searches
        for pattern in self._patterns:
            cache.get(pattern)

    def search(self, text: str) -> tuple[Hit | None, int]:
        """Search the held back text. Return the hit or None, and the number of characters to hold back if it is None.

        Raises:
            RequestError: the patterns exceeded their limit of CPU time.
        """
        self._num_pieces += 1
        began_at = self._clock()
        try:
            return self._search(text, began_at)
        finally:
            self._used_s += self._clock() - began_at

    def _search(self, text: str, now: float) -> tuple[Hit | None, int]:
        before = len(self._before)
        searched = self._before + text
        held_from = len(searched)
        first: Hit | None = None
        ends_at = now + min(PUSH_BUDGET_S, self._total_budget_s() - self._used_s)
        for index, pattern in enumerate(self._patterns):
            if index:
                now = self._clock()
            match = self._search_one(pattern, searched, before + self._starts[index], ends_at - now)
            start = len(searched) if match is None else match.start()
            self._starts[index] = start - before
            if match is None:
                continue
            if match.partial:
                held_from = min(held_from, start)
            elif first is None or (start - before, match.end() - before) < (first.start, first.end):
                first = Hit(match.end() - before, start - before, pattern)
        return first, min(len(searched) - held_from, REGEX_WINDOW)

    def advance(self, text: str) -> None:
        """Record that ``text`` was returned: now it is only context."""
        if text:
            self._before = (self._before + text)[-REGEX_LOOKBEHIND:]
            self._starts = [start - len(text) if start > len(text) else 0 for start in self._starts]

    def _total_budget_s(self) -> float:
        return REQUEST_BUDGET_S + PIECE_BUDGET_S * self._num_pieces

    def _search_one(self, pattern: str, text: str, start: int, timeout_s: float) -> PatternMatch | None:
        if timeout_s > 0:
            compiled = self._cache.get(pattern)  # the cache limits the number of compiled patterns
            try:
                return compiled.search(text, start, partial=True, timeout=timeout_s)
            except TimeoutError:
                pass
        total_s = self._total_budget_s()
        is_total = self._used_s > total_s - PUSH_BUDGET_S
        limit = f"{total_s:.3f} s for {self._num_pieces} tokens" if is_total else f"{PUSH_BUDGET_S} s for one token"
        message = f"stop_regex took longer than {limit}, with {pattern!r} on {len(text)} characters"
        raise RequestError("stop_regex", f"{message}; write it without nested repetitions")
