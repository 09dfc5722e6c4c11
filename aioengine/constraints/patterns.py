"""Stop patterns (``stop_regex``): bounds on the cost of compiling them, and a cache.

``regex`` copies a repeated part when it compiles, so ten characters such as ``(a{999}){999}`` can fill the memory.
Fuzzy matching, recursion and full case folding have similar costs. Searching is bounded by a timeout instead.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from typing import Any, Final

import regex

from aioengine.api import checks

MAX_SIZE: Final = 50_000
"""Largest ``expanded_size`` of all patterns of a request together. Compiling them takes 20 ms at most."""

_EMPTY_SEARCH_S: Final = 0.003
_BASE_BYTES: Final = 16_384
"""Estimated memory of a compiled pattern in addition to its own size."""
_PURGE_EVERY: Final = 1000
_LARGE_ESCAPE_BYTES: Final = 20
r"""Added for each \R and \X, which ``regex`` writes out as a dozen parts."""

_COSTLY = re.compile(
    r"""
    (?P<start>\\[GK])
    | \\.
    | \{(?P<least>[0-9]*),?(?P<most>[0-9]*)\}
    | (?P<fuzzy>\{[0-9<=+]*[deis][<=,:}+])
    | (?P<call>\(\?(?:R|[0-9]|&|[+-][0-9]|P[>&]))
    | (?P<flag>\(\?[A-Za-z01-]*(?:[frx]|V1))
    """,
    re.DOTALL | re.VERBOSE,
)
_REASONS: Final = {
    "start": "moves the start of the match, but text is searched piece by piece",
    "fuzzy": r"matches fuzzily; to match a literal brace, write \{",
    "call": "calls a group; write the group again in its place",
    "flag": "sets one of the flags f, r, x and V1, which are not supported",
}


_num_compiled = count(1)


def check_patterns(patterns: Sequence[str]) -> None:
    """Raise ValueError if a pattern cannot be used, or if the patterns are too large together."""
    size = sum(map(expanded_size, patterns))  # before anything is compiled
    if size > MAX_SIZE:
        raise ValueError(
            f"stop_regex: the {len(patterns)} patterns of one request have a size of {size} together (bytes times "
            f"counted repetitions); at most {MAX_SIZE} is allowed"
        )
    for pattern in patterns:
        _check_compiles(pattern)


@lru_cache(maxsize=1024)
def expanded_size(pattern: str) -> int:
    """The bytes of the pattern times all its counted repetitions.

    Raises:
        ValueError: the pattern is too large, or uses a feature that is not supported.
    """
    size = len(pattern.encode())
    if size > checks.MAX_PATTERN_BYTES:
        raise _refused(pattern, f"is longer than {checks.MAX_PATTERN_BYTES} bytes")
    size += _LARGE_ESCAPE_BYTES * (pattern.count(r"\R") + pattern.count(r"\X"))
    for token in _COSTLY.finditer(pattern):
        if token.lastgroup in _REASONS:
            raise _refused(pattern, f"has {token[0]!r}, which {_REASONS[token.lastgroup]}")
        size *= max(1, *(int(number or 1) for number in token.group("least", "most")))
    if size > MAX_SIZE:
        raise _refused(
            pattern,
            f"has a size of {checks.shown(size)} (bytes times counted repetitions); at most {MAX_SIZE} is allowed. "
            "Use * or + in place of large counts",
        )
    return size


def compile_pattern(pattern: str) -> Any:
    """Compile a stop pattern.

    Raises:
        ValueError: it is not valid, is refused by ``expanded_size``, or matches the empty text.
    """
    expanded_size(pattern)
    try:
        # Not cached by regex, whose cache is not limited in bytes.
        compiled = regex.compile(pattern, flags=regex.V0, cache_pattern=False)
        empty_match = compiled.search("", timeout=_EMPTY_SEARCH_S)
    except TimeoutError:
        raise _refused(pattern, "takes too long on the empty text; write it without nested repetitions") from None
    except Exception as error:  # of any type: some patterns meet bugs of the package
        raise _refused(pattern, f"is not a valid pattern: {error}") from error
    finally:
        if next(_num_compiled) % _PURGE_EVERY == 0:
            regex.purge()  # the package keeps a note of each pattern, cached or not
    if empty_match is not None:
        raise _refused(pattern, "matches the empty text, so that it would stop every answer; require a character")
    return compiled


@lru_cache(maxsize=1024)
def _check_compiles(pattern: str) -> None:
    compile_pattern(pattern)


def _refused(pattern: str, reason: str) -> ValueError:
    return ValueError(f"stop_regex {checks.shown(pattern)} {reason}")


class PatternCache:
    """The compiled patterns that were used last, up to a bound in bytes.

    Attributes:
        num_bytes: the memory of the patterns, estimated.
    """

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._max_bytes = max_bytes
        self._patterns: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self.num_bytes = 0

    def get(self, pattern: str) -> Any:
        """Raises ValueError as ``compile_pattern`` does."""
        if pattern in self._patterns:
            self._patterns.move_to_end(pattern)
            return self._patterns[pattern][0]
        compiled = compile_pattern(pattern)
        num_bytes = _BASE_BYTES + sys.getsizeof(compiled)
        self._patterns[pattern] = compiled, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes and len(self._patterns) > 1:
            _, (_, num_freed) = self._patterns.popitem(last=False)
            self.num_bytes -= num_freed
        return compiled
