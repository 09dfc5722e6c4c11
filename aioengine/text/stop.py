"""StopMatcher searches for stop strings and patterns in a growing text.

The stop that ends first ends the text. Of several patterns, only the match that starts first counts. If two stops end
at the same character, the longer one does. Only the longest suffix of the text that could still become a stop is held
back.

Patterns use the package ``regex``, which reports partial matches (the end of the text could be the start of a match)
and has a timeout for searches.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from aioengine.constraints.patterns import PatternCache
from aioengine.errors import RequestError


class Hit(NamedTuple):
    """A match in the searched text, with the stop string or pattern. The smallest hit ends the text."""

    end: int
    start: int
    matched: str


class StopStrings:
    """Finds the stop string that ends first, or else the open suffix: the longest suffix of the text that could still
    become a stop string.

    The start of the suffix is found by bisection in the sorted stop strings, and each position is discarded at most
    once. While there is an open suffix, each new character costs one ``endswith`` with all stop strings (a request has
    at most 32). An automaton (Aho and Corasick, 1975) would read each character once, but needs hundreds of bytes of
    memory for each character of each string.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        """stops: not empty, without empty strings."""
        self._stops = stops
        self._sorted = sorted(stops)
        self._max_length = max(map(len, stops))
        self._min_length = min(map(len, stops))
        self.find_start = _starts_pattern(tuple(sorted({stop[:2] for stop in stops}))).search
        """Finds the first position where a stop string may start: its first two characters, or its first character at
        the end of the text.
        """

    def scan(self, text: str, start: int, num_seen: int) -> tuple[Hit | None, int]:
        """Search the characters of ``text`` from ``num_seen`` on. Earlier calls have searched the others.

        start: the start of the open suffix of the searched characters; ``num_seen`` if there is none.
        Return the hit that ends first (of two with the same end, the longer one) or None, and the new ``start``.
        """
        if start == num_seen:
            begin = self.find_start(text, start)
            if begin is None:
                return None, len(text)
            start = begin.start()
        for end in range(max(num_seen + 1, start + self._min_length), len(text) + 1):
            if text.endswith(self._stops, start, end):
                complete = [stop for stop in self._stops if text.endswith(stop, start, end)]
                longest = max(complete, key=len)
                return Hit(end, end - len(longest), longest), end
        return None, self._start_of_prefix(text, start)

    def _start_of_prefix(self, text: str, start: int) -> int:
        """Return the first position from ``start`` on where the rest of the text is a prefix of a stop string."""
        begin = self.find_start(text, max(start, len(text) - self._max_length + 1))
        while begin is not None:
            tail = text[begin.start() :]
            nearest = bisect_left(self._sorted, tail)
            if nearest < len(self._sorted) and self._sorted[nearest].startswith(tail):
                return begin.start()
            begin = self.find_start(text, begin.start() + 1)
        return len(text)


@lru_cache(maxsize=256)
def _starts_pattern(pairs: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for the starts of stop strings. pairs: the first two characters of each, or its only one."""
    seconds: dict[str, list[str]] = {}
    for pair in pairs:
        seconds.setdefault(pair[0], []).append(pair[1:])
    return re.compile("|".join(_start_pattern(first, others) for first, others in seconds.items()))


def _start_pattern(first: str, seconds: list[str]) -> str:
    """Return the pattern for stop strings that begin with ``first``. seconds: their second characters, "" for none."""
    if "" in seconds:
        return re.escape(first)
    return rf"{re.escape(first)}(?:[{''.join(map(re.escape, seconds))}]|\Z)"


REGEX_WINDOW: Final = 1024
"""Maximum number of characters that are held back for a partial match."""

REGEX_LOOKBEHIND: Final = 64
"""Characters of returned text that lookbehinds and word boundaries can see."""

PUSH_BUDGET_S: Final = 0.02
"""Limit for all patterns of a request and one piece of text, in CPU time. Meanwhile, other requests get no text."""

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

    def _search_one(self, pattern: str, text: str, start: int, timeout_s: float) -> Any:
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


class StopMatcher:
    """Returns pushed text up to the first stop, and holds back a suffix that could become a stop.

    ``matched``: the stop string or pattern that ended the text, else None.
    """

    def __init__(
        self,
        stops: Sequence[str] = (),
        patterns: Sequence[str] = (),
        *,
        no_stop_trim: bool = False,
        cache: PatternCache | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Empty stop strings are ignored. no_stop_trim: the text includes the stop.

        cache: compiled patterns, shared with other requests. clock: returns the CPU time of this thread, for the budget
        of the patterns. Without it, only the time of each search is limited.

        Raises:
            ValueError: a pattern is invalid, or matches the empty text.
        """
        strings = tuple(stop for stop in stops if stop)
        self._strings = StopStrings(strings) if strings else None
        self._search = RegexSearch(patterns, cache or PatternCache(), clock) if patterns else None
        self._find_start = None if self._strings is None or self._search is not None else self._strings.find_start
        self._keeps_stop = no_stop_trim
        self._held = ""
        self._num_open = 0  # characters at the end of ``_held`` that may begin a stop string; patterns may hold more
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add text. Return the text that cannot be part of a stop. After a match, all text is dropped.

        With patterns, push the text of one token at a time: each call searches once.

        Raises:
            RequestError: a pattern took too long.
        """
        if not text or self.matched is not None:
            return ""
        if self._find_start is not None and not self._held and self._find_start(text) is None:
            return text  # the usual case: no stop string can start in it
        num_seen = len(self._held)
        held = self._held + text
        num_held = 0
        hit: Hit | None = None
        if self._strings is not None:
            hit, start = self._strings.scan(held, num_seen - self._num_open, num_seen)
            num_held = self._num_open = len(held) - start
        if self._search is not None:
            regex_hit, num_open = self._search.search(held)
            num_held = max(num_held, num_open)
            if regex_hit is not None and (hit is None or regex_hit < hit):
                hit = regex_hit
        if hit is not None:
            self._held = ""
            self.matched = hit.matched
            return held[: hit.end if self._keeps_stop else hit.start]
        safe = held[: len(held) - num_held]
        self._held = held[len(held) - num_held :]
        if self._search is not None:
            self._search.advance(safe)
        return safe

    def flush(self) -> str:
        """Return the text that was held back. Call this after the last text."""
        held, self._held, self._num_open = self._held, "", 0
        return held
