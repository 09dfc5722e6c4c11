"""Checks of values from callers: their errors name the field, the allowed values, and the value.

A value of the wrong type is a ``TypeError``, a value outside the range a ``ValueError``. A bool is no number here:
``max_new_tokens=True`` is a mistake, not 1.
"""

from __future__ import annotations

import difflib
import math
import operator
import reprlib
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat, SupportsIndex, TypeVar, cast, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Value = TypeVar("Value")
Check = Callable[[str, object], object]
"""From a field's name and the value that was given to the value that is kept. Raises TypeError or ValueError."""

MAX_COUNT = 2**31 - 1
MAX_SHOWN_CHARACTERS = 80
MAX_NAME_CHARACTERS = 300
MAX_PATTERN_BYTES = 256
MAX_TENANT_BYTES = 256
MAX_NESTING = 1000
"""Of data that is written as JSON."""
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
    """The value as an error message shows it: its repr, cut to a readable length without building all of it."""
    try:
        return _shown(plain(value) if isinstance(value, str) else value)
    except Exception as error:
        return f"a {type(value).__name__} (its repr raises {type(error).__name__})"


def _shown(value: object) -> str:
    if isinstance(value, str | bytes) and len(value) > MAX_SHOWN_CHARACTERS:
        return f"{value[:MAX_SHOWN_CHARACTERS]!r}... ({len(value)} long)"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if not isinstance(value, str | bytes) and (size := num_items(value)) > MAX_SHOWN_CHARACTERS:
        return f"a {type(value).__name__} of {size} items"
    shortened = _SHORT.repr(value) if type(value) in (list, tuple, dict, set) else repr(value)
    return shortened if len(shortened) <= MAX_SHOWN_CHARACTERS else f"{shortened[:MAX_SHOWN_CHARACTERS]}..."


def name(text: str) -> str:
    """A name from a file as it is; as ``shown`` where it is long, or has characters that a terminal would obey."""
    return text if len(text) <= MAX_NAME_CHARACTERS and text.isprintable() else shown(text)


def cut(text: str) -> str:
    """A text of several parts in a readable length: its beginning and its end."""
    most = 4 * MAX_SHOWN_CHARACTERS
    return text if len(text) <= 2 * most else f"{text[:most]} ... {text[-most:]}"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """``1 call``, ``2 calls``. ``plural``: where the noun does not end in just one more s."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def num_items(value: object) -> int:
    """Of a list, an array and the like; 0 for all else."""
    if isinstance(value, list | tuple):
        return len(_storage(cast("object", value)))
    try:
        return len(value) if isinstance(value, Sized) else 0
    except TypeError:  # an array of no dimension
        return 0


def wrong_type(name: str, allowed: str, value: object) -> TypeError:
    return TypeError(f"{name} must be {allowed}, got {shown(value)} of type {type(value).__name__}")


def wrong_value(name: str, allowed: str, value: object) -> ValueError:
    return ValueError(f"{name} must be {allowed}, got {shown(value)}")


def plain(value: object) -> object:
    """The number or list that an array of any package holds, the plain string of a subclass of str (as numpy and
    enumerations have), the plain list or tuple of a subclass; every other value as it is.
    """
    if type(value) in _PLAIN:  # the usual case, much faster
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list | tuple):
        return _storage(cast("object", value))
    return value.tolist() if isinstance(value, Array) else value


def _storage(value: object) -> Sequence[object]:
    """The entries of a list or tuple, whatever a subclass says when it is asked for its length or iterated."""
    if type(value) not in _PLAIN:  # without its methods
        of: type[object] = list if issubclass(type(value), list) else tuple
        value = cast("Callable[[object, slice], object]", vars(of)["__getitem__"])(value, slice(None))
    return cast("Sequence[object]", value)


def whole(name: str, value: object, low: int, high: int = MAX_COUNT) -> int:
    """An integer from ``low`` to ``high``. Numbers of other packages (numpy, torch) count when their type is whole."""
    if type(value) is int and low <= value <= high:
        return value  # the usual case, without making the words of an error
    allowed = f"an integer of at least {low}" if high == MAX_COUNT else f"an integer from {low} to {high}"
    value = value if isinstance(value, int) else plain(value)
    if isinstance(value, bool) or not isinstance(value, int | SupportsIndex):  # int first: it is quick
        raise wrong_type(name, allowed, value)
    try:
        found = int(operator.index(value))
    except TypeError:  # an array that is no number, or no whole one
        raise wrong_type(name, allowed, value) from None
    if found > high:
        raise wrong_value(name, f"an integer from {low} to {high}", found)
    if found < low:
        raise wrong_value(name, allowed, found)
    return found


def number(name: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    """A finite number from ``low`` to ``high``; with ``above``, ``low`` itself is outside."""
    if type(value) is float and low <= value <= high and not (above and value == low):
        return value  # the usual case, without making the words of an error
    allowed = f"a number above {low:g} and up to {high:g}" if above else f"a number from {low:g} to {high:g}"
    value = value if isinstance(value, int | float) else plain(value)
    if isinstance(value, bool) or not isinstance(value, int | float | SupportsFloat):
        raise wrong_type(name, allowed, value)
    try:
        found = float(value)
    except (OverflowError, TypeError, ValueError):
        raise wrong_value(name, allowed, value) from None
    if not math.isfinite(found) or not low <= found <= high or (above and found == low):
        raise wrong_value(name, allowed, value)
    return found


def whole_from(low: int, high: int = MAX_COUNT) -> Check:
    """The check of an integer from ``low`` to ``high``."""
    return lambda name, value: whole(name, value, low, high)


def whole_or_minus_one(meaning: str) -> Check:
    """The check of an integer of at least 1, or -1, which has the meaning."""

    def check(name: str, value: object) -> object:
        found = whole(name, value, -1)
        if found == 0:
            raise wrong_value(name, f"-1 ({meaning}) or an integer of at least 1", value)
        return found

    return check


def number_from(low: float, high: float, *, above: bool = False) -> Check:
    """The check of a number from ``low``, or above it, to ``high``."""
    return lambda name, value: number(name, value, low, high, above=above)


def switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(name, "True or False", value)
    return value


def text(name: str, value: object, *, max_bytes: int | None = None) -> str:
    """A string that can be encoded (no lone surrogates) and has at most ``max_bytes`` bytes of UTF-8.

    Of a subclass of str it is the plain string: messages hold no others.
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
    return value


def choice(name: str, value: object, choices: Mapping[str, Value]) -> Value:
    """The value of one of the words in ``choices``."""
    value = plain(value)
    if not isinstance(value, str):
        raise wrong_type(name, "one of " + ", ".join(map(repr, choices)), value)
    if value not in choices:
        raise wrong_value(name, "one of " + ", ".join(map(repr, choices)) + did_you_mean(value, choices), value)
    return choices[value]


def items(name: str, value: object, max_items: int, *, allowed: str = "a list") -> list[object]:
    """The entries of a list, tuple or array (of nothing else: a string, a set or a generator is a mistake)."""
    return list(sequence(name, value, max_items, allowed=allowed))


def sequence(name: str, value: object, max_items: int = MAX_COUNT, *, allowed: str = "a list") -> Sequence[object]:
    """The list or tuple itself, however long, or an array as a list."""
    value = plain(value)
    if not isinstance(value, list | tuple):
        raise wrong_type(name, allowed, value)
    found = cast("Sequence[object]", value)
    if len(found) > max_items:
        raise ValueError(f"{name} must have at most {max_items} entries, got {len(found)}")
    return found


def json_size(value: object, most: int) -> int:
    """About how many characters nested data has as JSON, and rather fewer, found without making them. More than
    ``most`` where counting ended there, or at a depth that no JSON has: what holds itself has any number.
    """
    level: list[Any] = [value]
    num_characters = 0
    for _ in range(MAX_NESTING):
        num_characters += 2 * len(level)  # at least, with what stands between the entries
        below: list[Any] = []
        for each in level:
            if num_characters > most:
                return most + 1
            if isinstance(each, str):
                num_characters += str.__len__(each)
            elif isinstance(each, dict | list | tuple):
                entries = cast("dict[object, object] | Sequence[object]", each)
                if num_characters + len(below) + len(entries) > most:
                    return most + 1
                below += entries.values() if isinstance(entries, dict) else entries
                if isinstance(entries, dict):
                    num_characters += 3 * len(entries)
                    num_characters += sum(str.__len__(key) for key in entries if isinstance(key, str))
            elif isinstance(each, int):
                num_characters += each.bit_length() * 3 // 10
        if not below:
            return num_characters
        level = below
    return most + 1


def off(name: str, value: object, allowed: tuple[object, ...], feature: str) -> None:
    """Accept None, and the values that switch off a feature that is not available yet; raise ValueError for others."""
    if value is not None and not any(type(value) is type(entry) and value == entry for entry in allowed):
        words = " or ".join(shown(entry) for entry in (*allowed, None))
        raise ValueError(f"{name}={shown(value)}: {feature}: not available yet, only {words} is accepted")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ " (did you mean 'x'?)" for the nearest of the known words, else nothing."""
    meant = nearest(word, known)
    return f" (did you mean {meant!r}?)" if meant else ""


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the most similar known word. None: no word has a similarity of at least ``cutoff`` (1: the same word)."""
    return next(iter(difflib.get_close_matches(word[:100], list(known), n=1, cutoff=cutoff)), None)
