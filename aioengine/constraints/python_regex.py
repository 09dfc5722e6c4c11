"""Translate Python's regular expressions to the syntax of llguidance, with the same or a narrower meaning.

The result matches whole texts. Parts that cannot be translated are refused: lookaround, backreferences, atomic groups,
possessive repetitions, conditions, word boundaries, anchors in the middle.

Classes are written out, because ``\\d``, ``\\w`` and ``\\s`` mean other characters in other libraries. They have the
characters that this version of Python knows. In patterns of JSON schemas they are ASCII, because ECMAScript and Python
differ in the others.
"""

from __future__ import annotations

import re
import unicodedata
from _sre import unicode_tolower  # type: ignore[import-not-found]
from functools import lru_cache
from re import _casefix as cases  # type: ignore[attr-defined]  # the tables and the parser of the standard library
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Final, NoReturn

from aioengine.api.checks import shown
from aioengine.errors import UnsupportedSchemaError

MAX_BYTES: Final = 8192
MAX_REPEATS: Final = 100_000
"""Maximum repetitions of the innermost part of nested repetitions."""

_AGE: Final = rf"\p{{age:{unicodedata.unidata_version.rpartition('.')[0]}}}"
_ASCII: Final = {
    codes.CATEGORY_DIGIT: "0-9",
    codes.CATEGORY_WORD: "0-9A-Za-z_",
    codes.CATEGORY_SPACE: r"\t\n\x0B\f\r ",
}
_UNICODE: Final = {
    codes.CATEGORY_DIGIT: rf"[\p{{Nd}}&&{_AGE}]",
    codes.CATEGORY_WORD: rf"[\p{{L}}\p{{N}}_&&{_AGE}]",
    codes.CATEGORY_SPACE: r"\s\x1C-\x1F",
}
_WIDEST: Final = {
    codes.CATEGORY_DIGIT: r"\p{Nd}",
    codes.CATEGORY_WORD: r"\w\p{L}\p{N}",
    codes.CATEGORY_SPACE: r"\s\x1C-\x1F",
}
"""The characters that any library has in the category. A negated class must exclude all of them."""

_NEGATED: Final = {
    codes.CATEGORY_NOT_DIGIT: codes.CATEGORY_DIGIT,
    codes.CATEGORY_NOT_WORD: codes.CATEGORY_WORD,
    codes.CATEGORY_NOT_SPACE: codes.CATEGORY_SPACE,
}
_STARTS: Final = (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING)
_ENDS: Final = (codes.AT_END, codes.AT_END_STRING)
_ANY_TEXT: Final = "(?s:.*)"
_FOLDED_BY_ASCII: Final = "\u0130\u0131\u017f\u212a"
"""Characters that match ASCII letters with ``re.IGNORECASE``, in addition to the letters of the other case."""


def translate(pattern: str, *, pointer: str, is_searched: bool = False) -> str:
    """Return ``pattern`` in the syntax of llguidance, for whole texts.

    pointer: the JSON pointer to the pattern, for errors. is_searched: it may match a part of the text, as in a schema.

    Raises:
        ValueError: it is not a valid regular expression.
        UnsupportedSchemaError: a part of it cannot be translated.
    """
    prefix = f"{shown(pattern)} at {pointer}: " if pointer else ""
    try:
        return _translated(pattern, is_searched)
    except UnsupportedSchemaError as error:
        raise UnsupportedSchemaError(f"{prefix}{error}", pointer=pointer, keyword=error.keyword) from None
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None


@lru_cache(maxsize=64)
def _translated(pattern: str, is_searched: bool) -> str:
    return _Translator(pattern, is_searched=is_searched).text


class _Translator:
    """Translates one pattern. ``text``: the translation."""

    def __init__(self, pattern: str, *, is_searched: bool) -> None:
        self._keyword = "pattern" if is_searched else "regex"
        if len(pattern.encode(errors="surrogatepass")) > MAX_BYTES:
            self._refuse(f"more than {MAX_BYTES:,} bytes")
        try:
            parsed: Any = parser.parse(pattern)
        except (re.error, OverflowError, RecursionError, FutureWarning) as error:  # warnings may be errors
            raise ValueError(f"it is not a valid Python regular expression: {error}") from None
        flags = parsed.state.flags
        self._is_searched = is_searched
        try:
            self.text = self._whole(list(parsed), flags, open_start=is_searched, open_end=is_searched)
        except RecursionError:
            self._refuse("groups that are nested too deeply")

    def _refuse(self, part: str) -> NoReturn:
        raise UnsupportedSchemaError(f"it has {part}; write it without", keyword=self._keyword)

    def _whole(self, items: list[Any], flags: int, *, open_start: bool, open_end: bool) -> str:
        """Translate the items of the whole pattern, or of a branch of it. They may start and end with anchors.

        open_start, open_end: any text may come before or after them.
        """
        while items and items[0][0] is codes.AT and items[0][1] in _STARTS:
            items, open_start = items[1:], False
        while items and items[-1][0] is codes.AT and items[-1][1] in _ENDS:
            items, open_end = items[:-1], False
        code: Any = items[0][0] if len(items) == 1 else None
        value: Any = items[0][1] if len(items) == 1 else None
        if code is codes.BRANCH:
            branches = [
                self._whole(list(branch), flags, open_start=open_start, open_end=open_end) for branch in value[1]
            ]
            return f"(?:{'|'.join(branches)})"
        if code is codes.SUBPATTERN:
            _, added, removed, inner = value
            inside = _flags_inside(flags, added, removed)
            return f"(?:{self._whole(list(inner), inside, open_start=open_start, open_end=open_end)})"
        text = self._sequence(items, flags, 1)
        return f"{_ANY_TEXT if open_start else ''}{text}{_ANY_TEXT if open_end else ''}"

    def _sequence(self, items: list[Any], flags: int, repeats: int) -> str:
        return "".join(self._item(code, value, flags, repeats) for code, value in items)

    def _item(self, code: Any, value: Any, flags: int, repeats: int) -> str:
        """Translate one item. repeats: the maximum repetitions of the items around it."""
        if code is codes.LITERAL:
            return self._class([(code, value)], flags) if flags & re.IGNORECASE else escaped(value)
        if code is codes.ANY:
            return "(?s:.)" if flags & re.DOTALL else r"[^\n]"
        if code is codes.NOT_LITERAL:
            return self._class([(codes.NEGATE, None), (codes.LITERAL, value)], flags)
        if code is codes.IN:
            return self._class(value, flags)
        if code is codes.BRANCH:
            return f"(?:{'|'.join(self._sequence(list(branch), flags, repeats) for branch in value[1])})"
        if code is codes.SUBPATTERN:
            _, added, removed, inner = value
            return f"(?:{self._sequence(list(inner), _flags_inside(flags, added, removed), repeats)})"
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            return self._repeat(*value, flags=flags, repeats=repeats)
        if code is codes.AT:
            self._refuse("an anchor or a word boundary in the middle")
        if code in (codes.ASSERT, codes.ASSERT_NOT):
            self._refuse("lookaround")
        if code in (codes.GROUPREF, codes.GROUPREF_EXISTS, codes.GROUPREF_IGNORE):
            self._refuse("a reference to a group")
        self._refuse("an atomic group or a possessive repetition")

    def _repeat(self, min_count: int, max_count: Any, inner: Any, *, flags: int, repeats: int) -> str:
        is_open = max_count is codes.MAXREPEAT
        repeats *= max(1, int(min_count if is_open else max_count))
        if repeats > MAX_REPEATS:
            self._refuse(f"more than {MAX_REPEATS:,} counted repetitions")
        text = self._sequence(list(inner), flags, repeats)
        return f"(?:{text}){{{int(min_count)},{'' if is_open else int(max_count)}}}"

    def _class(self, members: list[Any], flags: int) -> str:
        is_negated = members[0][0] is codes.NEGATE
        written = [self._member(code, value, flags, is_negated=is_negated) for code, value in members[is_negated:]]
        return f"[{'^' if is_negated else ''}{''.join(written)}]"

    def _member(self, code: Any, value: Any, flags: int, *, is_negated: bool) -> str:
        """Translate a member of a class to at most Python's characters, in a negated class to at least these."""
        if code is codes.CATEGORY:
            base = _NEGATED.get(value, value)
            is_wide = (base is not value) is not is_negated  # excluded characters, of any library
            is_ascii = self._is_searched or flags & re.ASCII
            table = _WIDEST if is_wide else _ASCII if is_ascii else _UNICODE
            return table[base] if base is value else f"[^{table[base]}]"
        first, last = (value, value) if code is codes.LITERAL else value
        written = escaped(first) if first == last else f"{escaped(first)}-{escaped(last)}"
        if not flags & re.IGNORECASE:
            return written
        if last > 0x7F and (is_negated or first != last):
            self._refuse("a class beyond ASCII that ignores case")
        if first != last:
            written += _other_case(first, last, "AZ", 32) + _other_case(first, last, "az", -32)
        else:
            written += "".join(escaped(ord(char)) for char in _same_letters(chr(first), flags))
        return written + (_FOLDED_BY_ASCII if is_negated else "")


def _other_case(first: int, last: int, ends: str, distance: int) -> str:
    """Return the ASCII letters of a range that lie between ``ends``, in the other case."""
    first, last = max(first, ord(ends[0])), min(last, ord(ends[1]))
    return f"{chr(first + distance)}-{chr(last + distance)}" if first <= last else ""


def _flags_inside(flags: int, added: int, removed: int) -> int:
    """Return the flags inside a group. ASCII and UNICODE exclude each other."""
    if added & (re.ASCII | re.UNICODE):
        flags &= ~(re.ASCII | re.UNICODE)
    return (flags | added) & ~removed


def _same_letters(char: str, flags: int) -> list[str]:
    """Return the characters that Python treats as equal to this one if case is ignored."""
    if flags & re.ASCII:
        return [char.swapcase()] if char.isascii() else []
    lower = unicode_tolower(ord(char))
    known = {lower, *cases._EXTRA_CASES.get(lower, ())}
    others = {char.lower(), char.upper(), char.title(), char.casefold()}
    return [other for other in others if len(other) == 1 and unicode_tolower(ord(other)) in known]


def escaped(code: int) -> str:
    """Return a character as it is written inside or outside a class."""
    char = chr(code)
    if char.isascii() and char.isalnum():
        return char
    if 0xD800 <= code <= 0xDFFF:
        raise ValueError(f"U+{code:04X} is half of a surrogate pair, which cannot occur in text")
    return f"\\x{{{code:X}}}"
