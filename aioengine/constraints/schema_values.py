"""The keywords of JSON Schema for strings, numbers and counts, and where in a schema something stands."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, cast

from aioengine.api import checks
from aioengine.constraints.python_regex import translate
from aioengine.errors import UnsupportedSchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_LENGTH: Final = 1_000_000
MAX_MULTIPLE: Final = 1000
MAX_INTEGER: Final = 2**53
MAX_NUMBER: Final = 1e15
MIN_NUMBER: Final = 1e-9
MAX_DIGITS: Final = 15
MIN_EXPONENT: Final = -22
"""Of the last digit: 10**22 is the largest power of ten that is a 64-bit float."""

Schema = dict[str, Any]

_LEAP: Final = "(?:0[48]|[2468][048]|[13579][26])"
_DATE: Final = (
    "(?:(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-"
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
_HOUR_AND_MINUTE: Final = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME: Final = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR_AND_MINUTE})"
_OWN_FORMATS: Final = {"date-time": f"{_DATE}T{_TIME}", "time": _TIME, "date": _DATE}
"""Those of the library have 29 February in all years. Of years, times and letters they have what most programs read: no
year 0, no leap seconds, no small letters.
"""
_FORMATS: Final = (*_OWN_FORMATS, "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
MAX_HOSTNAME: Final = 253
_CONTROL: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""What no escape but ``\\u`` writes."""
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


class Subschema(NamedTuple):
    """A part of a schema, and how to find it: its JSON pointer, and how many schemas it stands in."""

    given: Schema
    pointer: str
    depth: int

    def at(self, *keys: str | int) -> str:
        """The JSON pointer to what lies below."""
        return self.pointer + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)

    def refuse(self, keyword: str, why: str) -> NoReturn:
        """Raise UnsupportedSchemaError."""
        message = f"{keyword!r} at {self.pointer or '#'} {why}"
        raise UnsupportedSchemaError(message, pointer=self.pointer, keyword=keyword)

    def wrong(self, keyword: str, allowed: str, value: object) -> NoReturn:
        """Raise ValueError: this is no JSON schema."""
        message = f"{keyword!r} at {self.pointer or '#'} must be {allowed}, got {repr(value)[:80]}"
        raise ValueError(message)


def check_constant(place: Subschema, keyword: str) -> None:
    """Whether the values of ``const`` or ``enum`` can be written, down to those within them.

    Raises:
        UnsupportedSchemaError: one has a control character, or a number that would be rounded.
    """
    waiting: list[Any] = [place.given[keyword]]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += cast("Schema", value).values()
        elif isinstance(value, list):
            entries: list[Any] = value
            waiting += entries
        elif isinstance(value, str) and _CONTROL.search(value):
            place.refuse(keyword, f"has a control character other than \\b \\f \\n \\r \\t, in {checks.shown(value)}")
        elif isinstance(value, int | float) and not _is_exact(value):
            place.refuse(
                keyword, f"has {checks.shown(value)}; integers up to 2**53 are enforced, and numbers of 15 digits"
            )


def _is_exact(value: float) -> bool:
    """Whether the library, which computes with 64-bit floats, reads and writes this number as it is."""
    if value % 1 == 0 or math.isinf(value):
        return abs(value) <= MAX_INTEGER
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    return len(digits) <= MAX_DIGITS and int(exponent) >= MIN_EXPONENT


def compile_string(place: Subschema) -> Schema:
    """The schema of a string for the library, with our own patterns for formats that it does not enforce.

    Raises:
        ValueError: a keyword has a wrong value, or one that is not enforced; the message has its place.
    """
    given = place.given
    found: Schema = dict(compile_counts(place, "minLength", "maxLength"))
    if "pattern" in given:
        if not isinstance(given["pattern"], str):
            place.wrong("pattern", "a string", given["pattern"])
        found["pattern"] = f"^(?:{translate(given['pattern'], pointer=place.at('pattern'), is_searched=True)})$"
    name = given.get("format")
    if isinstance(name, str) and name in _OWN_FORMATS:
        own = f"^{_OWN_FORMATS[name]}$"
        return found | ({"allOf": [{"pattern": own}]} if "pattern" in found else {"pattern": own})
    if "format" in given:
        if name not in _FORMATS:
            place.refuse("format", f"{name!r} is not enforced; {', '.join(_FORMATS)} are")
        found["format"] = name
    if name == "hostname":
        found["maxLength"] = min(found.get("maxLength", MAX_HOSTNAME), MAX_HOSTNAME)
    return found


def compile_counts(place: Subschema, least: str, most: str) -> Mapping[str, int]:
    """The values of two keywords that limit a number of things."""
    found: dict[str, int] = {}
    for keyword in (least, most):
        if keyword not in place.given:
            continue
        value = place.given[keyword]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf or value % 1:
            place.wrong(keyword, "a whole number from 0 on", value)
        if value > MAX_LENGTH:
            place.refuse(keyword, f"is more than {MAX_LENGTH:,}")
        found[keyword] = int(value)
    if found.get(least, 0) > found.get(most, MAX_LENGTH):
        place.refuse(least, f"is more than {most!r}: no value is valid")
    return found


def compile_number(place: Subschema, *, is_integer: bool) -> Schema:
    """Bounds include their value: exclusive ones are replaced by the next allowed number, as are those that the library
    would round.
    """
    found: Schema = {}
    bounds = {name: _bound(place, name, is_integer=is_integer) for name in _BOUNDS if name in place.given}
    low = max(_within(bounds.get("minimum"), 1), _beyond(bounds.get("exclusiveMinimum"), 1, is_integer=is_integer))
    high = min(_within(bounds.get("maximum"), -1), _beyond(bounds.get("exclusiveMaximum"), -1, is_integer=is_integer))
    if low > high:
        place.refuse("minimum", "and its maximum leave no number")
    if low > -math.inf:
        found["minimum"] = math.ceil(low) if is_integer else low
    if high < math.inf:
        found["maximum"] = math.floor(high) if is_integer else high
    if "multipleOf" in place.given:
        value = place.given["multipleOf"]
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            place.wrong("multipleOf", "a number above 0", value)
        if value > MAX_MULTIPLE or value != math.floor(value) or not is_integer:
            place.refuse("multipleOf", f"is enforced for integers alone, and up to {MAX_MULTIPLE}")
        found["multipleOf"] = int(value)
    return found


def _bound(place: Subschema, keyword: str, *, is_integer: bool) -> float:
    value = place.given[keyword]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:  # NaN
        place.wrong(keyword, "a number", value)
    if is_integer and abs(value) <= MAX_INTEGER:
        return value
    if is_integer or abs(value) > MAX_NUMBER or 0 < abs(value) < MIN_NUMBER:
        place.refuse(keyword, "is beyond what is enforced: integers up to 2**53, numbers from 1e-9 to 1e15, and 0")
    return value


def _within(bound: float | None, direction: int) -> float:
    """An inclusive bound, or the next number that is exact."""
    return bound if bound is not None and _is_exact(bound) else _beyond(bound, direction, is_integer=False)


def _beyond(bound: float | None, direction: int, *, is_integer: bool) -> float:
    """The first allowed number next to an exclusive bound: for numbers, of 15 digits."""
    if bound is None:
        return -direction * math.inf
    if is_integer:
        return (math.floor(bound) + 1) if direction > 0 else (math.ceil(bound) - 1)
    if bound == 0:
        return direction * MIN_NUMBER
    digits = 14 - math.floor(math.log10(abs(bound)))
    return round(bound + direction * 10.0**-digits, max(0, digits))
