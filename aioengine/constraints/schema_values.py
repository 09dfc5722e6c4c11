"""Compiles the JSON Schema keywords for strings, numbers and counts. llguidance compiles the result."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Context, Decimal
from typing import Any, Final, NamedTuple, NoReturn, cast

from aioengine.api import checks
from aioengine.constraints.python_regex import translate
from aioengine.errors import UnsupportedSchemaError

MAX_LENGTH: Final = 1_000_000
MAX_MULTIPLE: Final = 1000
MAX_INTEGER: Final = 2**53
"""Larger integers are refused, because llguidance computes with 64-bit floats."""
MAX_NUMBER: Final = 1e15
MIN_NUMBER: Final = 1e-9
"""Largest and smallest magnitude of a bound of the type "number". The bound 0 is allowed, too."""
MAX_DIGITS: Final = 15
MIN_EXPONENT: Final = -22
"""Smallest exponent of the last digit: 10**22 is the largest power of ten that a 64-bit float represents exactly."""

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
"""Patterns for formats, because llguidance allows 29 February in every year. They allow only values that most programs
read: no year 0, no leap seconds, no lower-case letters.
"""
_FORMATS: Final = (*_OWN_FORMATS, "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
MAX_HOSTNAME: Final = 253
_CONTROL: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Control characters that can only be written with a ``\\u`` escape."""
_DIGITS: Final = Context(prec=MAX_DIGITS)


class Subschema(NamedTuple):
    """A schema inside the value of a parameter.

    keywords: its keywords with their values. pointer: its JSON pointer. depth: the number of schemas around it.
    """

    keywords: Schema
    pointer: str
    depth: int

    def at(self, *keys: str | int) -> str:
        """Return the JSON pointer to a value inside it."""
        return self.pointer + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)

    def raise_unsupported(self, keyword: str, reason: str) -> NoReturn:
        """Raise UnsupportedSchemaError: the keyword cannot be enforced."""
        message = f"{keyword!r} at {self.pointer or '#'} {reason}"
        raise UnsupportedSchemaError(message, pointer=self.pointer, keyword=keyword)

    def raise_invalid(self, keyword: str, allowed: str, value: object) -> NoReturn:
        """Raise ValueError: the value of the keyword is not valid in a JSON schema."""
        raise ValueError(f"{keyword!r} at {self.pointer or '#'} must be {allowed}, got {repr(value)[:80]}")


def check_constant(schema: Subschema, keyword: str) -> None:
    """Check all values in ``const`` or ``enum``, including nested ones.

    Raises:
        UnsupportedSchemaError: a string has a control character, or a number would be rounded.
    """
    unchecked: list[Any] = [schema.keywords[keyword]]
    while unchecked:
        value = unchecked.pop()
        if isinstance(value, dict):
            unchecked += cast("Schema", value).values()
        elif isinstance(value, list):
            unchecked += cast("Sequence[Any]", value)
        elif isinstance(value, str) and _CONTROL.search(value):
            schema.raise_unsupported(
                keyword, f"has a control character other than \\b \\f \\n \\r \\t, in {checks.shown(value)}"
            )
        elif isinstance(value, int | float) and not _is_exact(value):
            reason = f"has {checks.shown(value)}; integers up to 2**53 are enforced, and numbers of 15 digits"
            schema.raise_unsupported(keyword, reason)


def _is_exact(value: float) -> bool:
    """Return whether llguidance reads and writes the number without rounding. It computes with 64-bit floats."""
    if value % 1 == 0 or math.isinf(value):
        return abs(value) <= MAX_INTEGER
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    return len(digits) <= MAX_DIGITS and int(exponent) >= MIN_EXPONENT


def compile_pattern(pattern: str, pointer: str) -> str:
    """Return the pattern in the syntax of llguidance, anchored at both ends."""
    return f"^(?:{translate(pattern, pointer=pointer, is_searched=True)})$"


def compile_string(schema: Subschema) -> Schema:
    """Compile the keywords for strings. Some formats become patterns.

    Raises:
        ValueError: a keyword has a wrong value, or a value that is not enforced.
    """
    keywords = schema.keywords
    compiled: Schema = compile_counts(schema, "minLength", "maxLength")
    if "pattern" in keywords:
        if not isinstance(keywords["pattern"], str):
            schema.raise_invalid("pattern", "a string", keywords["pattern"])
        compiled["pattern"] = compile_pattern(keywords["pattern"], schema.at("pattern"))
    if "format" not in keywords:
        return compiled
    name = keywords["format"]
    if name not in _FORMATS:
        schema.raise_unsupported("format", f"{name!r} is not enforced; {', '.join(_FORMATS)} are")
    if name in _OWN_FORMATS:
        own: Schema = {"pattern": f"^{_OWN_FORMATS[name]}$"}
        return compiled | ({"allOf": [own]} if "pattern" in compiled else own)
    compiled["format"] = name
    if name == "hostname":
        compiled["maxLength"] = min(compiled.get("maxLength", MAX_HOSTNAME), MAX_HOSTNAME)
    return compiled


def compile_counts(schema: Subschema, min_keyword: str, max_keyword: str) -> dict[str, int]:
    """Compile two keywords that limit a number of things."""
    compiled: dict[str, int] = {}
    for keyword in (min_keyword, max_keyword):
        if keyword not in schema.keywords:
            continue
        value = schema.keywords[keyword]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf or value % 1:
            schema.raise_invalid(keyword, "an integer from 0", value)
        if value > MAX_LENGTH:
            schema.raise_unsupported(keyword, f"is more than {MAX_LENGTH:,}")
        compiled[keyword] = int(value)
    if compiled.get(min_keyword, 0) > compiled.get(max_keyword, MAX_LENGTH):
        schema.raise_unsupported(min_keyword, f"is more than {max_keyword!r}: no value is valid")
    return compiled


def compile_number(schema: Subschema, *, is_integer: bool) -> Schema:
    """Compile the keywords for numbers to inclusive bounds that llguidance does not round."""
    compiled: Schema = {}
    low = max(_bound(schema, name, 1, is_integer=is_integer) for name in ("minimum", "exclusiveMinimum"))
    high = min(_bound(schema, name, -1, is_integer=is_integer) for name in ("maximum", "exclusiveMaximum"))
    if low > high:
        schema.raise_unsupported("minimum", "and its maximum leave no number")
    if low > -math.inf:
        compiled["minimum"] = low
    if high < math.inf:
        compiled["maximum"] = high
    if "multipleOf" in schema.keywords:
        value = schema.keywords["multipleOf"]
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            schema.raise_invalid("multipleOf", "a number above 0", value)
        if value > MAX_MULTIPLE or value != math.floor(value) or not is_integer:
            schema.raise_unsupported("multipleOf", f"is enforced only for integers, and up to {MAX_MULTIPLE}")
        compiled["multipleOf"] = int(value)
    return compiled


def _bound(schema: Subschema, keyword: str, direction: int, *, is_integer: bool) -> float:
    """Return the first allowed number of a bound, or infinity if there is no such bound.

    direction: 1 for a lower bound, -1 for an upper bound.
    """
    if keyword not in schema.keywords:
        return -direction * math.inf
    value = schema.keywords[keyword]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:  # NaN
        schema.raise_invalid(keyword, "a number", value)
    if abs(value) > MAX_INTEGER if is_integer else (abs(value) > MAX_NUMBER or 0 < abs(value) < MIN_NUMBER):
        schema.raise_unsupported(keyword, "is not enforced; integers up to 2**53, 0, and numbers from 1e-9 to 1e15 are")
    is_exclusive = keyword.startswith("exclusive")
    if is_integer:
        rounded = math.ceil(value) if direction > 0 else math.floor(value)
        return rounded + direction if is_exclusive and rounded == value else rounded
    if not is_exclusive and _is_exact(value):
        return value
    if value == 0:
        return direction * MIN_NUMBER
    number = Decimal(repr(value))  # the next one with 15 digits is not rounded
    return float(_DIGITS.next_plus(number) if direction > 0 else _DIGITS.next_minus(number))
