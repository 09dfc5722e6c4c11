"""Patterns of the ``regex`` package from callers: their cost is bounded before they are compiled.

``regex`` writes out counted repetitions when it compiles, follows calls of groups without a limit, and matches fuzzily
in exponential time: a pattern of ten characters can take a minute and all memory. ``expanded_size`` finds this in one
pass over the pattern. It reads the syntax as ``regex`` does by default; where a pattern switches to another syntax
(verbose, or version 1 with its nested sets), it assumes that every repetition stands inside all others.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Final, Protocol, cast

import regex

from aioengine import checks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_REPEATS: Final = 10_000
"""How often the innermost part of nested repetitions may be repeated at most."""

MAX_EXPANDED_SIZE: Final = 20_000
"""Parts of all patterns of a request after counted repetitions are written out; each takes 0.1 to 0.2 us and about
250 bytes to compile."""

BYTES_PER_PART: Final = 250
BYTES_PER_PATTERN: Final = 16_384
LARGE_BYTES: Final = 131_072

_EMPTY_SEARCH_S: Final = 0.003
_PURGE_EVERY: Final = 1000
_COMPILER_ERRORS: Final = LookupError, TypeError, AttributeError, AssertionError
"""Errors of ``regex`` itself, which some patterns meet."""

_LARGE: Final = {r"\R": 12, r"\X": 12}
"""Escapes that ``regex`` writes out as many parts: a line ending, a grapheme."""

_FOLDED_PART: Final = 4
_FOLDED_SET: Final = 5000
"""Parts that count for each one, and beside that for each set, under full case folding: ``regex`` makes a set a choice
between all sequences of characters that fold to the same as one of its members."""

# White space and comments, which verbose patterns may have nearly anywhere, and what ``regex`` reads behind a "{".
_SPACE = r"(?:\s|\#[^\n]*+\n)*+"
_NUMBER = rf"[0-9](?:{_SPACE}[0-9])*+"
_COST = rf"(?:{_NUMBER}{_SPACE})?+[dis]{_SPACE}"
_AT_MOST = rf"<{_SPACE}=?{_SPACE}"
_FUZZY_ITEM = (
    rf"(?:[deis]{_SPACE}(?:{_AT_MOST}{_NUMBER}{_SPACE})?"
    rf"|{_NUMBER}{_SPACE}{_AT_MOST}[deis]{_SPACE}{_AT_MOST}{_NUMBER}{_SPACE}"
    rf"|{_COST}(?:\+{_SPACE}{_COST})*{_AT_MOST}{_NUMBER}{_SPACE})"
)
_FUZZY = rf"\{{{_SPACE}{_FUZZY_ITEM}(?:,{_SPACE}{_FUZZY_ITEM})*[:}}]"
_CALL = r"\(\?(?:R|[0-9]|&|[+-]\s*[0-9]|P\s*[>&])"
_PROPERTY_NAME = r"\^?[A-Za-z0-9\ &_.-]*(?:[:=][A-Za-z0-9\ &_./-]*)?"
_SET_ITEM = rf"\\.|\[:{_PROPERTY_NAME}:\]"

_TOKEN = re.compile(
    rf"""
    (?P<call>{_CALL})
    | (?P<nothing>\(\?\#(?:\\.|[^)\\])*\)? | \(\?[A-Za-z01-]*\))
    | (?P<open>\(\?\((?!\?)[^)]*\)? | \(\?(?:P?<[=!]? | P=? | [=!>|] | [A-Za-z01-]*: | (?=\()) | \((?!\*[A-Za-z]+\)))
    | (?P<close>\))
    | (?P<set>\[\^?(?:{_SET_ITEM}|.)(?:{_SET_ITEM}|[^\]\\])*\]?)
    | (?P<branch>\|)
    | (?P<repeat>(?:[*+?] | \{{(?:(?P<exactly>[0-9]+) | (?P<least>[0-9]*),(?P<most>[0-9]*))\}})[?+]?)
    | (?P<fuzzy>{_FUZZY})
    | (?P<one>\(\*[A-Za-z]+\) | \\[pP]\{{{_PROPERTY_NAME}\}} | \\N\{{[A-Za-z0-9\ -]*\}} | \\. | .)
    """,
    re.DOTALL | re.VERBOSE,
)
_SET_MEMBER = re.compile(rf"(?:{_SET_ITEM}|.)(?:-(?:\\.|[^\]]))?", re.DOTALL | re.VERBOSE)

_OTHER_SYNTAX = re.compile(r"\(\?[A-Za-z01-]*(?:x|V1)")
_CALL_ANYWHERE = re.compile(_CALL)
_FUZZY_ANYWHERE = re.compile(_FUZZY)
_REPEAT_ANYWHERE = re.compile(
    rf"(?=\{{{_SPACE}(?P<least>(?:{_NUMBER})?){_SPACE}(?P<comma>,?){_SPACE}(?P<most>(?:{_NUMBER})?){_SPACE}\}})"
)
_FLAGS = rf"\({_SPACE}\?{_SPACE}(?:[A-Za-z0-9-]{_SPACE})*"
_IGNORES_CASE = re.compile(_FLAGS + "i")
_FOLDS_FULLY = re.compile(rf"{_FLAGS}(?:f|V{_SPACE}1)")
_MOVES_START = re.compile(r"(?:[^\\]|\\.)*?(\\[GK])", re.DOTALL)
_NO_DIGITS = re.compile(r"\#[^\n]*|[^0-9]")


class Match(Protocol):
    """A match of the ``regex`` package."""

    @property
    def partial(self) -> bool: ...
    def start(self) -> int: ...
    def end(self) -> int: ...


class Pattern(Protocol):
    """A pattern of the ``regex`` package."""

    @property
    def pattern(self) -> str: ...
    @property
    def flags(self) -> int: ...
    def search(self, string: str, pos: int = ..., *, partial: bool = ..., timeout: float = ...) -> Match | None: ...


_compile = cast("Callable[..., Pattern]", regex.compile)
_num_compiled = count(1)


def check_patterns(patterns: Sequence[str]) -> None:
    """Refuse patterns that are too costly to compile or to keep, and patterns that can never stop a text sensibly.

    Raises:
        ValueError: what is wrong, with the pattern.
    """
    size = sum(map(_checked_size, patterns))
    if size > MAX_EXPANDED_SIZE:
        raise ValueError(
            f"the {len(patterns)} patterns of stop_regex have {size} parts when their repetitions are written out; "
            f"at most {MAX_EXPANDED_SIZE} are allowed together"
        )


def compile_pattern(pattern: str) -> tuple[Pattern, int]:
    """Compile a pattern within the bounds, and past the cache of ``regex``, which is bounded only by its number.

    Returns it with its ``expanded_size``.

    Raises:
        ValueError: it is no pattern, is beyond the bounds, cannot be searched for piece by piece, or matches the empty
            text and so would end every request at once.
    """
    size = expanded_size(pattern)
    if found := _MOVES_START.match(pattern):
        raise _refused(pattern, f"has {found[1]}, which has no meaning in text that is searched piece by piece")
    try:
        compiled = _compile(pattern, flags=0 if "V1" in pattern else regex.V0, cache_pattern=False)
        empty_match = compiled.search("", timeout=_EMPTY_SEARCH_S)
    except TimeoutError:
        raise _refused(pattern, "takes too long on the empty text; write it without nested repetitions") from None
    except (regex.error, ValueError, OverflowError, RecursionError) as error:
        raise _refused(pattern, f"is not a valid pattern: {error}") from None
    except _COMPILER_ERRORS as error:
        raise _refused(
            pattern, f"cannot be compiled by the regex package, which raises {error!r}; write it in another way"
        ) from error
    finally:
        if next(_num_compiled) % _PURGE_EVERY == 0:
            regex.purge()  # it keeps a note of each pattern, cached or not
    if compiled.flags & regex.REVERSE:
        raise _refused(pattern, "searches backwards (flag r), but text is searched as it comes; leave the flag out")
    if empty_match is not None:
        raise _refused(
            pattern,
            "matches the empty text, so that nothing would ever be generated; write a pattern that needs at least one "
            "character",
        )
    return compiled, size


def expanded_size(pattern: str) -> int:
    """The parts of the pattern after counted repetitions are written out.

    Raises:
        ValueError: it is longer than ``checks.MAX_PATTERN_BYTES``, calls groups, matches fuzzily, or repeats more
            than the bounds allow.
    """
    if len(pattern.encode()) > checks.MAX_PATTERN_BYTES:
        raise _refused(pattern, f"is longer than {checks.MAX_PATTERN_BYTES} bytes")
    is_folded = bool(_IGNORES_CASE.search(pattern) and _FOLDS_FULLY.search(pattern))
    scan = _size_at_most if _OTHER_SYNTAX.search(pattern) else _size
    size = scan(pattern, is_folded=is_folded)
    if size > MAX_EXPANDED_SIZE:
        raise _refused(
            pattern,
            f"has {size} parts when its repetitions {'and case foldings ' * is_folded}are written out; at most "
            f"{MAX_EXPANDED_SIZE} are allowed{'; leave full case folding (flag f, or i with V1) out' * is_folded}",
        )
    return size


def _size(pattern: str, *, is_folded: bool) -> int:
    return _Scan(pattern, is_folded=is_folded).size()


class _Group:
    """A group while it is read: its items, of which the last may still be repeated.

    Attributes:
        size: parts of the items before the last one. most: the most repetitions within one of them.
        last_size, last_most: the same of the last item.
    """

    __slots__ = ("last_most", "last_size", "most", "size")

    def __init__(self) -> None:
        self.size = self.last_size = 0
        self.most = self.last_most = 1

    def add(self, size: int, most: int = 1) -> None:
        self.size += self.last_size
        self.most = max(self.most, self.last_most)
        self.last_size, self.last_most = size, most

    def repeat(self, least: int, most: int) -> None:
        """``regex`` writes out as many copies as there are at least."""
        self.last_size = self.last_size * max(1, least) + 1
        self.last_most *= max(1, least, most)


class _Scan:
    """One pass over a pattern."""

    def __init__(self, pattern: str, *, is_folded: bool) -> None:
        self._pattern = pattern
        self._part = _FOLDED_PART if is_folded else 1
        self._set = _FOLDED_SET if is_folded else 0
        self._groups = [_Group()]

    def size(self) -> int:
        for token in _TOKEN.finditer(self._pattern):
            self._read(token)
        while len(self._groups) > 1:  # unbalanced: not a pattern
            self._close()
        self._groups[0].add(0)
        return self._groups[0].size

    def _read(self, token: re.Match[str]) -> None:
        kind, text = token.lastgroup, token[0]
        group = self._groups[-1]
        if kind == "call":
            raise _refused(self._pattern, _CALLS)
        if kind == "fuzzy":
            raise _refused(self._pattern, _IS_FUZZY)
        if kind == "repeat":
            self._repeat(token)
        elif kind == "open":
            self._groups.append(_Group())
        elif kind == "close" and len(self._groups) > 1:
            self._close()
        elif kind == "set":
            group.add(self._set + self._part * (1 + len(_SET_MEMBER.findall(text[1:-1]))))
        elif kind != "nothing":
            group.add(self._part * _LARGE.get(text, 1))

    def _repeat(self, token: re.Match[str]) -> None:
        group = self._groups[-1]
        exactly, least, most = (int(number or 0) for number in token.group("exactly", "least", "most"))
        group.repeat(exactly or least, exactly or most)
        _check_repeats(self._pattern, group.last_most)

    def _close(self) -> None:
        group = self._groups.pop()
        group.add(0)
        self._groups[-1].add(group.size + 2, group.most)


def _size_at_most(pattern: str, *, is_folded: bool) -> int:
    """The size if each part that looks like a repetition stands inside all others; needs no knowledge of groups."""
    if _CALL_ANYWHERE.search(pattern):
        raise _refused(pattern, _CALLS)
    if _FUZZY_ANYWHERE.search(pattern):
        raise _refused(pattern, _IS_FUZZY)
    size = len(pattern) + sum(size * pattern.count(escape) for escape, size in _LARGE.items())
    if is_folded:
        size = _FOLDED_PART * size + _FOLDED_SET * pattern.count("[")
    repeats = 1
    for found in _REPEAT_ANYWHERE.finditer(pattern):
        least, most = (int(_NO_DIGITS.sub("", number) or 0) for number in found.group("least", "most"))
        size *= max(1, least)
        repeats *= max(1, least, most)
        _check_repeats(pattern, repeats)
    return size


def _check_repeats(pattern: str, repeats: int) -> None:
    if repeats > MAX_REPEATS:
        raise _refused(
            pattern,
            f"repeats a part {checks.shown(repeats)} times, nested repetitions multiplied; at most {MAX_REPEATS} are "
            "allowed",
        )


@lru_cache(maxsize=1024)
def _checked_size(pattern: str) -> int:
    """The size of a pattern that compiles."""
    return compile_pattern(pattern)[1]


_CALLS = "calls a group, as (?R), (?1) and (?&name) do; write what is called in its place"
_IS_FUZZY = r"matches fuzzily; where a literal brace is meant, write \{"


def _refused(pattern: str, reason: str) -> ValueError:
    return ValueError(f"stop_regex {checks.shown(pattern)} {reason}")


class PatternCache:
    """Compiled patterns, those that were used last, up to a bound in bytes.

    Large patterns have a separate part, so that they cannot displace the others.
    """

    def __init__(self, max_bytes: int = 32 << 20) -> None:
        """``max_bytes``: of each part."""
        self._small = _Part(max_bytes)
        self._large = _Part(max_bytes)

    @property
    def num_bytes(self) -> int:
        """The memory of the patterns, estimated."""
        return self._small.num_bytes + self._large.num_bytes

    def get(self, pattern: str) -> Pattern:
        """Raises ValueError as ``compile_pattern`` does."""
        for part in (self._small, self._large):
            found = part.get(pattern)
            if found is not None:
                part.move_to_end(pattern)
                return found[0]
        compiled, size = compile_pattern(pattern)
        num_bytes = BYTES_PER_PATTERN + BYTES_PER_PART * size
        part = self._large if num_bytes > LARGE_BYTES else self._small
        part.add(pattern, compiled, num_bytes)
        return compiled


class _Part(OrderedDict[str, tuple[Pattern, int]]):
    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def add(self, pattern: str, compiled: Pattern, num_bytes: int) -> None:
        self[pattern] = compiled, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes and len(self) > 1:
            _, (_, num_freed) = self.popitem(last=False)
            self.num_bytes -= num_freed
