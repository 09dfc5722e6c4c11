"""Stop strings and patterns in a growing text.

The stop whose last character comes first ends the text; of two that end at the same character, the one that starts
first. Only the longest suffix of the text that could still become a stop is held back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.constraints.patterns import PatternCache
from aioengine.text.stop_regex import RegexSearch
from aioengine.text.stop_strings import Hit, StopStrings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class StopMatcher:
    """Passes pushed text on up to the first stop, and holds back the end that could become one.

    Attributes:
        matched: the stop string or pattern that ended the text, else None.
        search: the search for the patterns, with the CPU time that it took; None without patterns.
    """

    __slots__ = ("_find_start", "_held", "_keeps_stop", "_num_open", "_strings", "matched", "search")

    def __init__(
        self,
        stops: Sequence[str] = (),
        patterns: Sequence[str] = (),
        *,
        no_stop_trim: bool = False,
        cache: PatternCache | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Empty stop strings are ignored. With ``no_stop_trim`` the text includes the stop, else it ends before it.

        ``cache``: compiled patterns, shared with other requests. ``clock``: returns the CPU time of this thread, to
        measure what the patterns use of their budget; without it, only the time of each single search is limited.

        Raises:
            ValueError: a pattern is invalid, or matches the empty text.
        """
        strings = tuple(stop for stop in stops if stop)
        self._strings = StopStrings(strings) if strings else None
        self.search = RegexSearch(patterns, cache or PatternCache(), clock) if patterns else None
        self._find_start = None if self._strings is None or self.search is not None else self._strings.find_start
        self._keeps_stop = no_stop_trim
        self._held = ""
        self._num_open = 0  # characters at the end of ``_held`` that may begin a stop string; patterns may hold more
        self.matched: str | None = None

    @property
    def has_stops(self) -> bool:
        """Whether the request has stop strings or patterns."""
        return self._strings is not None or self.search is not None

    def push(self, text: str) -> str:
        """Take the next piece of text and return what cannot be part of a stop any more.

        After a match all text is dropped. With patterns, push the text of one token at a time: each call searches for
        them once.

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
        if self.search is not None:
            found, num_open = self.search.search(held)
            num_held = max(num_held, num_open)
            if found is not None and (hit is None or found < hit):
                hit = found
        if hit is not None:
            self._held = ""
            self.matched = hit.matched
            return held[: hit.end if self._keeps_stop else hit.start]
        safe = held[: len(held) - num_held]
        self._held = held[len(held) - num_held :]
        if self.search is not None:
            self.search.advance(safe)
        return safe

    def flush(self) -> str:
        """Return the text that was held back; no more text will come."""
        held, self._held, self._num_open = self._held, "", 0
        return held
