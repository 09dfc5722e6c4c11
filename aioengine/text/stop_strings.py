"""All stop strings of a request in a growing text, without building anything from them.

An automaton of the strings (Aho and Corasick, 1975) reads each character once, but takes hundreds of bytes for each
character of each string. Here the text that could still become a stop string is compared with the strings themselves,
which are sorted. A position is given up at most once, so a text takes a few comparisons for each character.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple


class Hit(NamedTuple):
    """A stop that was found: where it ends and begins in the searched text, and the stop string or pattern."""

    end: int
    start: int
    matched: str


class StopStrings:
    """Finds the stop string that is complete first, else the longest end of the text that could become one."""

    __slots__ = ("_num_longest", "_num_shortest", "_sorted", "_stops", "begin_in")

    def __init__(self, stops: tuple[str, ...]) -> None:
        """``stops``: at least one, none empty."""
        self._stops = stops
        self._sorted = sorted(stops)
        self._num_longest = max(map(len, stops))
        self._num_shortest = min(map(len, stops))
        self.begin_in = _beginnings(tuple(sorted({stop[:2] for stop in stops}))).search
        """Finds the first place where a stop string may begin: its first two characters, or one at the end."""

    def scan(self, text: str, start: int, num_seen: int) -> tuple[Hit | None, int]:
        """Look at the characters of ``text`` from ``num_seen`` on.

        ``start``: where those before begin that could become a stop string, ``num_seen`` if there are none. Returns
        the stop string that is complete first (of two that end together the longer), and else the new ``start``.
        """
        if start == num_seen:
            begin = self.begin_in(text, start)
            if begin is None:
                return None, len(text)
            start = begin.start()
        for end in range(max(num_seen + 1, start + self._num_shortest), len(text) + 1):
            if text.endswith(self._stops, start, end):
                complete = [stop for stop in self._stops if text.endswith(stop, start, end)]
                longest = max(complete, key=len)
                return Hit(end, end - len(longest), longest), end
        return None, self._open_from(text, start)

    def _open_from(self, text: str, start: int) -> int:
        """The first position from ``start`` on whence the text is the beginning of a stop string."""
        begin = self.begin_in(text, max(start, len(text) - self._num_longest + 1))
        while begin is not None:
            tail = text[begin.start() :]
            nearest = bisect_left(self._sorted, tail)
            if nearest < len(self._sorted) and self._sorted[nearest].startswith(tail):
                return begin.start()
            begin = self.begin_in(text, begin.start() + 1)
        return len(text)


@lru_cache(maxsize=256)
def _beginnings(pairs: tuple[str, ...]) -> re.Pattern[str]:
    """``pairs``: the first two characters of each stop string, or its only one."""
    seconds: dict[str, list[str]] = {}
    for pair in pairs:
        seconds.setdefault(pair[0], []).append(pair[1:])
    return re.compile("|".join(_beginning(first, others) for first, others in seconds.items()))


def _beginning(first: str, seconds: list[str]) -> str:
    if "" in seconds:
        return re.escape(first)
    return rf"{re.escape(first)}(?:[{''.join(map(re.escape, seconds))}]|\Z)"
