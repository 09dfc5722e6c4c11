"""Checks of values from callers. Their errors name the field, the allowed values, and the wrong value.

A wrong type raises ``TypeError``, a value outside the range ``ValueError``. A bool is not a number here:
``max_new_tokens=True`` is a mistake, not 1.
"""

from __future__ import annotations

import difflib
import math
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, Protocol, SupportsFloat, SupportsIndex, TypeVar, cast, runtime_checkable

Value = TypeVar("Value")
Check = Callable[[str, object], object]
"""Takes the name and the value of a field, and returns the value that is kept. Raises TypeError or ValueError."""

MAX_COUNT = 2**31 - 1
MAX_SHOWN_CHARACTERS = 80
MAX_NAME_CHARACTERS = 300
MAX_PATTERN_BYTES = 256
MAX_TENANT_BYTES = 256
MAX_NESTING = 1000
"""Maximum depth of data that is written as JSON."""
TEXTS = "a string or a list of strings"

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 4
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = 10
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = MAX_SHOWN_CHARACTERS

_PLAIN = frozenset((int, float, bool, str, bytes, list, tuple, dict, set, type(None)))


@runtime_checkable
class Array(Protocol):
    """An array of numpy, a tensor of torch, a series of pandas."""

    def tolist(self) -> object: ...


def shown(value: object) -> str:
    """Return the repr of a value for an error message, shortened without building all of it."""
    if isinstance(value, str):
        value = str.__str__(value)
    if isinstance(value, str | bytes) and len(value) > MAX_SHOWN_CHARACTERS:
        return f"{value[:MAX_SHOWN_CHARACTERS]!r}... ({len(value)} long)"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if not isinstance(value, str | bytes) and (size := num_items(value)) > MAX_SHOWN_CHARACTERS:
        return f"a {type(value).__name__} of {size} items"
    try:
        shortened = _SHORT.repr(value) if type(value) in (list, tuple, dict, set) else repr(value)
    except Exception as error:
        return f"a {type(value).__name__} (its repr raises {type(error).__name__})"
    return shortened if len(shortened) <= MAX_SHOWN_CHARACTERS else f"{shortened[:MAX_SHOWN_CHARACTERS]}..."


def name(text: str) -> str:
    """Return a name from a file. If it is long or has control characters, return its ``shown`` form."""
    return text if len(text) <= MAX_NAME_CHARACTERS and text.isprintable() else shown(text)


def cut(text: str) -> str:
    """Return the start and the end of a long text."""
    num_shown = 4 * MAX_SHOWN_CHARACTERS
    return text if len(text) <= 2 * num_shown else f"{text[:num_shown]} ... {text[-num_shown:]}"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return ``1 call`` or ``2 calls``. plural: the plural of the noun, if it is irregular."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def num_items(value: object) -> int:
    """Return the length of a list, an array or another sized object; 0 for other values."""
    try:
        return len(value) if isinstance(value, Sized) else 0
    except TypeError:  # an array of no dimension
        return 0


def wrong_type(name: str, allowed: str, value: object) -> TypeError:
    return TypeError(f"{name} must be {allowed}, got {shown(value)} of type {type(value).__name__}")


def wrong_value(name: str, allowed: str, value: object) -> ValueError:
    return ValueError(f"{name} must be {allowed}, got {shown(value)}")


def plain(value: object) -> object:
    """Convert arrays of any package to numbers or lists, and subclasses of str, list and tuple to plain objects.

    Other values stay as they are. (numpy and enumerations have subclasses of str.)
    """
    if type(value) in _PLAIN:  # the usual case, much faster
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list | tuple):
        return list(cast("Sequence[object]", value))
    return value.tolist() if isinstance(value, Array) else value


def whole(name: str, value: object, low: int, high: int = MAX_COUNT) -> int:
    """Check an integer from ``low`` to ``high``. Integers of other packages (numpy, torch) are accepted."""
    if type(value) is int and low <= value <= high:
        return value  # the usual case, without building an error message
    allowed = f"an integer of at least {low}" if high == MAX_COUNT else f"an integer from {low} to {high}"
    value = value if isinstance(value, int) else plain(value)
    if isinstance(value, bool) or not isinstance(value, int | SupportsIndex):  # int first: faster
        raise wrong_type(name, allowed, value)
    try:
        integer = int(operator.index(value))
    except TypeError:  # an array that is not one integer
        raise wrong_type(name, allowed, value) from None
    if integer > high:
        raise wrong_value(name, f"an integer from {low} to {high}", integer)
    if integer < low:
        raise wrong_value(name, allowed, integer)
    return integer


def number(name: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    """Check a finite number from ``low`` to ``high``. With ``above``, ``low`` itself is not allowed."""
    if type(value) is float and low <= value <= high and not (above and value == low):
        return value  # the usual case, without building an error message
    allowed = f"a number above {low:g} and up to {high:g}" if above else f"a number from {low:g} to {high:g}"
    value = value if isinstance(value, int | float) else plain(value)
    if isinstance(value, bool) or not isinstance(value, int | float | SupportsFloat):
        raise wrong_type(name, allowed, value)
    try:
        finite = float(value)
    except (OverflowError, TypeError, ValueError):
        raise wrong_value(name, allowed, value) from None
    if not math.isfinite(finite) or not low <= finite <= high or (above and finite == low):
        raise wrong_value(name, allowed, value)
    return finite


def whole_from(low: int, high: int = MAX_COUNT) -> Check:
    """Return a check for an integer from ``low`` to ``high``."""
    return lambda name, value: whole(name, value, low, high)


def number_from(low: float, high: float, *, above: bool = False) -> Check:
    """Return a check for a number from ``low`` (or above it) to ``high``."""
    return lambda name, value: number(name, value, low, high, above=above)


def switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(name, "True or False", value)
    return value


def text(name: str, value: object, *, max_bytes: int | None = None, if_empty: str = "") -> str:
    """Check a string that UTF-8 can encode in at most ``max_bytes`` bytes. Subclasses become plain strings.

    ``if_empty``: the advice in the error for an empty string; without it, the string may be empty.
    """
    if not isinstance(value, str):
        raise wrong_type(name, "a string", value)
    value = value if type(value) is str else str.__str__(value)
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError as error:
        raise wrong_value(
            name, f"text that UTF-8 can encode (position {error.start} is a lone surrogate)", value
        ) from None
    if max_bytes is not None and size > max_bytes:
        raise wrong_value(name, f"at most {max_bytes} bytes of UTF-8", value)
    if if_empty and not value:
        raise ValueError(f"{name} is empty; {if_empty}")
    return value


def mapping(name: str, value: object, *, allowed: str) -> Mapping[object, object]:
    """Check a dict or another mapping."""
    if not isinstance(value, Mapping):
        raise wrong_type(name, allowed, value)
    return cast("Mapping[object, object]", value)


def choice(name: str, value: object, choices: Mapping[str, Value]) -> Value:
    """Return the value of a word in ``choices``."""
    value = plain(value)
    allowed = f"one of {', '.join(map(repr, choices))}"
    if not isinstance(value, str):
        raise wrong_type(name, allowed, value)
    if value not in choices:
        raise wrong_value(name, allowed + did_you_mean(value, choices), value)
    return choices[value]


def items(name: str, value: object, max_items: int, *, allowed: str = "a list") -> list[object]:
    """Return a new list of the entries of a list, tuple or array. A string, a set or a generator is a mistake."""
    return list(sequence(name, value, max_items, allowed=allowed))


def sequence(name: str, value: object, max_items: int = MAX_COUNT, *, allowed: str = "a list") -> Sequence[object]:
    """Return a list or tuple without copying it, or an array as a list."""
    value = plain(value)
    if not isinstance(value, (list, tuple)):  # faster than a union
        raise wrong_type(name, allowed, value)
    entries = cast("Sequence[object]", value)
    if len(entries) > max_items:
        raise ValueError(f"{name} must have at most {max_items} entries, got {len(entries)}")
    return entries


def json_size(value: object, limit: int) -> int:
    """Return a lower estimate of the characters that nested data has as JSON, without encoding it.

    If there are more than ``limit``, or the data is nested too deeply (it may contain itself), return ``limit + 1``.
    """
    level: list[Any] = [value]
    num_characters = 0
    for _ in range(MAX_NESTING):
        num_characters += 2 * len(level)  # at least, with separators
        below: list[Any] = []
        for item in level:
            if num_characters > limit:
                return limit + 1
            if isinstance(item, str):
                num_characters += str.__len__(item)
            elif isinstance(item, dict | list | tuple):
                entries = cast("dict[object, object] | Sequence[object]", item)
                if num_characters + len(below) + len(entries) > limit:
                    return limit + 1
                below += entries.values() if isinstance(entries, dict) else entries
                if isinstance(entries, dict):
                    num_characters += 3 * len(entries)
                    num_characters += sum(str.__len__(key) for key in entries if isinstance(key, str))
            elif isinstance(item, int):
                num_characters += item.bit_length() * 3 // 10
        if not below:
            return num_characters
        level = below
    return limit + 1


def off(name: str, value: object, allowed: tuple[object, ...], feature: str) -> None:
    """Raise ValueError unless the value is None, or switches off a feature that is not available yet."""
    if value is not None and not any(type(value) is type(entry) and value == entry for entry in allowed):
        words = " or ".join(shown(entry) for entry in (*allowed, None))
        raise ValueError(f"{name}={shown(value)}: {feature}: not available yet, only {words} is accepted")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the most similar known word, or an empty text."""
    meant = nearest(word, known)
    return f" (did you mean {meant!r}?)" if meant else ""


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the most similar known word. None: no word has a similarity of at least ``cutoff`` (1: the same word)."""
    return next(iter(difflib.get_close_matches(word[:100], list(known), n=1, cutoff=cutoff)), None)
