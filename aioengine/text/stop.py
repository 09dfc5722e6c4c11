"""Stop strings and patterns in a growing text.

The stop that is complete first ends the text; of two that are complete with the same character, the one that begins
first. Held back is the longest end of the text that could still become a stop, and nothing more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.patterns import PatternCache
from aioengine.text.stop_regex import RegexSearch
from aioengine.text.stop_strings import Hit, StopStrings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class StopMatcher:
    """Passes text on up to a stop.

    Attributes:
        matched: the stop string or pattern that ended the text, else None.
        search: the patterns, which know the CPU time they took; None where there are none.
    """

    __slots__ = ("_begin_in", "_held", "_keeps_stop", "_num_open", "_strings", "matched", "search")

    def __init__(
        self,
        stops: Sequence[str] = (),
        patterns: Sequence[str] = (),
        *,
        no_stop_trim: bool = False,
        cache: PatternCache | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Empty stop strings are ignored. With ``no_stop_trim`` the text ends behind the stop, else before it.

        ``cache``: of compiled patterns, shared with other requests. ``clock``: the CPU time of this thread, which
        the patterns' budget is measured with; without one, only each search by itself is bounded.

        Raises:
            ValueError: a pattern is invalid, or matches the empty text.
        """
        strings = tuple(stop for stop in stops if stop)
        self._strings = StopStrings(strings) if strings else None
        self.search = RegexSearch(patterns, cache or PatternCache(), clock) if patterns else None
        self._begin_in = None if self._strings is None or self.search is not None else self._strings.begin_in
        self._keeps_stop = no_stop_trim
        self._held = ""
        self._num_open = 0  # characters at its end that could become a stop string; a pattern may hold back more
        self.matched: str | None = None

    @property
    def has_stops(self) -> bool:
        """Whether the request has stop strings or patterns."""
        return self._strings is not None or self.search is not None

    def push(self, text: str) -> str:
        """Take the next piece of text and return what cannot be part of a stop any more.

        Behind a match all text is dropped. With patterns the piece should be one token's text: they are searched for
        once per piece.

        Raises:
            RequestError: a pattern took too long.
        """
        if not text or self.matched is not None:
            return ""
        if self._begin_in is not None and not self._held and self._begin_in(text) is None:
            return text  # nearly always: no stop string can begin in it
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
            self.search.pass_by(safe)
        return safe

    def flush(self) -> str:
        """Return the text that was held back; no more text will come."""
        held, self._held, self._num_open = self._held, "", 0
        return held
