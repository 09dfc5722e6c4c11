"""StopMatcher searches for stop strings and patterns in a growing text.

The stop that ends first ends the text. If two stops end at the same character, the longer one does. Only the longest
suffix of the text that could still become a stop is held back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.constraints.patterns import PatternCache
from aioengine.text.stop_regex import RegexSearch
from aioengine.text.stop_strings import Hit, StopStrings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
