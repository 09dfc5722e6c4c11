"""Stop patterns: what to hold back while a regular expression could still match.

Patterns are those of the ``regex`` package, which can tell that a text might begin a match, and can give up in time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

import regex

from aioengine.errors import RequestError
from aioengine.text.stop_strings import Hit

if TYPE_CHECKING:
    from collections.abc import Callable

REGEX_WINDOW = 1024
"""Characters of not yet given out text that a pattern may still match in; older text is given out."""

REGEX_LOOKBEHIND = 64
"""Characters of given out text that lookbehinds and word boundaries may see."""

REGEX_TIMEOUT_S = 0.25
"""What one search may take. A pattern that needs longer fails its request."""


class Match(Protocol):
    """What is used of a match of the ``regex`` package."""

    @property
    def partial(self) -> bool: ...
    def start(self) -> int: ...
    def end(self) -> int: ...


class Pattern(Protocol):
    """What is used of a pattern of the ``regex`` package."""

    @property
    def pattern(self) -> str: ...
    def search(self, string: str, pos: int = ..., *, partial: bool = ..., timeout: float = ...) -> Match | None: ...


_compile = cast("Callable[[str], Pattern]", regex.compile)


def compile_stop_regex(pattern: str) -> Pattern:
    """Compile a stop pattern.

    Raises:
        ValueError: it is not a pattern, or it matches the empty text and so would end every request at once.
    """
    try:
        compiled = _compile(pattern)
    except (regex.error, OverflowError, RecursionError) as error:
        raise ValueError(f"stop_regex {pattern!r} is not a regular expression: {error}") from None
    if compiled.search("") is not None:
        raise ValueError(
            f"stop_regex {pattern!r} matches the empty text, so that nothing would ever be generated; "
            "write a pattern that needs at least one character"
        )
    return compiled


class RegexSearch:
    """The stop patterns of one request.

    A pattern is searched for after each piece of text (in a pipeline: after each token), in the last
    ``REGEX_LOOKBEHIND`` characters given out and up to ``REGEX_WINDOW`` characters held back. The match that begins
    first ends the request; the end of what has arrived counts as the end of the text, so ``[0-9]+`` is complete with
    the first piece that holds a digit.
    """

    __slots__ = ("_before", "_patterns", "_timeout_s")

    def __init__(self, patterns: tuple[str, ...], *, timeout_s: float = REGEX_TIMEOUT_S) -> None:
        """Raises ValueError as ``compile_stop_regex`` does."""
        self._patterns = [compile_stop_regex(pattern) for pattern in patterns]
        self._timeout_s = timeout_s
        self._before = ""

    def search(self, text: str) -> tuple[Hit | None, int]:
        """Search the held back text; returns the hit, if any, and else how many characters to hold back.

        Raises:
            RequestError: a search took longer than the timeout.
        """
        start = len(self._before)
        text = self._before + text
        held_from = len(text)
        hits: list[Hit] = []
        for pattern in self._patterns:
            match = self._search_one(pattern, text, start)
            if match is None:
                continue
            if match.partial:
                held_from = min(held_from, match.start())
            else:
                hits.append(Hit(match.end() - start, match.start() - start, pattern.pattern))
        first = min(hits, key=lambda hit: (hit.start, hit.end), default=None)
        return first, min(len(text) - held_from, REGEX_WINDOW)

    def pass_by(self, text: str) -> None:
        """Note text that was given out."""
        self._before = (self._before + text)[-REGEX_LOOKBEHIND:]

    def _search_one(self, pattern: Pattern, text: str, start: int) -> Match | None:
        try:
            return pattern.search(text, start, partial=True, timeout=self._timeout_s)
        except TimeoutError:
            raise RequestError(
                "detokenize",
                f"stop_regex {pattern.pattern!r} took longer than {self._timeout_s} s on {len(text)} characters; "
                "write it without nested repetitions",
            ) from None
