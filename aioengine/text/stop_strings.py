"""StopStrings searches for the stop strings of a request in a growing text.

The open suffix is the longest suffix of the text that could still become a stop string. Its start is found by bisection
in the sorted stop strings, and each position is discarded at most once. While there is an open suffix, each new
character costs one ``endswith`` with all stop strings (a request has at most 32).

An automaton (Aho and Corasick, 1975) would read each character once, but needs hundreds of bytes of memory for each
character of each string.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple


class Hit(NamedTuple):
    """A match in the searched text, with the stop string or pattern. The smallest hit ends the text."""

    end: int
    start: int
    matched: str


class StopStrings:
    """Finds the stop string that ends first, or else the open suffix."""

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
