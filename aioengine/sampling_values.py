"""Values of sampling parameters as plain ones, whatever kind was given: what they may be, and what is kept of them."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Set
from contextlib import suppress
from typing import Annotated, Final, SupportsFloat, SupportsIndex, TypeGuard, cast

from msgspec import Meta, ValidationError, convert

from aioengine import checks

MAX_STOPS: Final = 32
MAX_STOP_BYTES: Final = 4096
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_ENTRIES_OF_CALL: Final = 65_536
"""Stop token ids and biases in all parameters of a call, which are looked at together."""
MAX_BIAS: Final = 1e6
MAX_BIASES: Final = 4096
"""Entries of a ``logit_bias``: each is looked at at the call, sent, and added in every step."""

_PLAIN: Final = frozenset((int, float, str))
_TokenId = Annotated[int, Meta(ge=0, le=checks.MAX_COUNT)]
_PlainIds = list[_TokenId]
_PlainBiases = dict[_TokenId, Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]]
"""What nearly everybody gives is checked in one pass."""


def plain_number(value: object, *, is_whole: bool) -> object:
    """An int or a float, where the value can become one; else the value itself. Raises whatever its methods raise."""
    if is_whole:
        return int(operator.index(value)) if isinstance(value, SupportsIndex) else value
    return float(value) if isinstance(value, SupportsFloat) else value


def strings(name: str, value: object, max_bytes: int) -> tuple[str, ...]:
    if value is None:
        return ()
    value = checks.plain(value)
    given = [value] if isinstance(value, str) else checks.items(name, value, MAX_STOPS, allowed=checks.TEXTS)
    return tuple(checks.text(name, entry, max_bytes=max_bytes) for entry in given)


def kept_strings(name: str, value: object) -> object:
    """None, a plain string or a list of them, whatever kind was given; a list that has no others is kept itself."""
    if value is None or type(value) is str:
        return value
    found = strings(name, value, MAX_STOP_BYTES)
    if isinstance(checks.plain(value), str):
        return found[0]
    is_kept = isinstance(value, list) and set(map(type, cast("list[object]", value))) <= {str}
    return cast("list[str]", value) if is_kept else list(found)


def token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    found = _plain_ids(value)
    return _any_token_ids(value) if found is None else found


def _plain_ids(value: object) -> tuple[int, ...] | None:
    """The ids of a list of nothing but plain integers; None for all else."""
    if (size := checks.num_items(value)) > MAX_STOP_TOKEN_IDS and not isinstance(value, str | bytes):
        raise ValueError(f"stop_token_ids must have at most {MAX_STOP_TOKEN_IDS} entries, got {size}")
    if isinstance(value, list | tuple):
        with suppress(ValidationError):
            return tuple(convert(cast("object", value), _PlainIds))
    return None


def _any_token_ids(value: object) -> tuple[int, ...]:
    given = sorted(cast("Set[object]", value), key=hash) if isinstance(value, Set) else value
    found = checks.items("stop_token_ids", given, MAX_STOP_TOKEN_IDS, allowed="a list of token ids")
    return tuple(checks.whole("stop_token_ids entries", entry, 0) for entry in found if entry is not None)


def biases(value: object) -> dict[int, float]:
    """Token id -> bias; keys may be strings of digits, as they are in JSON."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise checks.wrong_type("logit_bias", "a dict of token id to number", value)
    given = cast("Mapping[object, object]", value)
    if len(given) > MAX_BIASES:
        raise ValueError(f"logit_bias must have at most {MAX_BIASES} entries, got {len(given)}")
    with suppress(ValidationError):
        return convert(given, _PlainBiases)
    return _any_biases(given)


def _any_biases(value: Mapping[object, object]) -> dict[int, float]:
    found: dict[int, float] = {}
    for key, bias in value.items():
        token_id = checks.whole("logit_bias keys", int(key) if _is_digits(key) else key, 0)
        if token_id in found:
            raise ValueError(f"logit_bias has token id {token_id} twice")
        bias = -MAX_BIAS if _is_minus_infinity(bias) else bias
        found[token_id] = checks.number(f"logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS)
    return found


def _is_digits(key: object) -> TypeGuard[str]:
    return isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10


def _is_minus_infinity(value: object) -> bool:
    return checks.plain(value) == -math.inf


def is_plain_copy(given: object, kept: list[int] | dict[int, float]) -> bool:
    """Whether this is a list of plain numbers, or a dict of them, that can be kept itself."""
    if not isinstance(given, list | dict):
        return False
    found = cast("list[object] | dict[object, object]", given)
    values = found if isinstance(found, list) else (*found, *found.values())
    return _PLAIN.issuperset(map(type, values)) and found == kept
