"""Names of other engines: our names for the same things, or why these names are refused or ignored.

The tables are in ``foreign_names.json``. Other names of sampling parameters are fields of ``params.SamplingParams``,
where type checkers see them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct, json

from aioengine.api import checks

Features = dict[str, dict[str, list[object]]]
"""Missing feature -> its arguments -> the values besides None that switch it off."""

Missing = dict[str, tuple[tuple[object, ...], str]]
"""Argument of a missing feature -> (the values besides None that switch it off, the feature)."""


class _Tables(Struct):
    aliases: dict[str, str]
    missing_arguments: Features
    missing_options: Features
    missing_parameters: Features
    flags: dict[str, list[str]]
    our_way: dict[str, list[str]]
    ignored: frozenset[str]


_TABLES: Final = json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=_Tables)


def _by_name(groups: Mapping[str, list[str]]) -> dict[str, str]:
    """Invert a table: from meaning -> names to name -> meaning."""
    return {name: meaning for meaning, names in groups.items() for name in names}


def _missing(features: Features) -> Missing:
    return {name: (tuple(off), feature) for feature, names in features.items() for name, off in names.items()}


ALIASES: Final = _TABLES.aliases
"""Other names of the constructor's arguments."""

MISSING_ARGUMENTS: Final = _missing(_TABLES.missing_arguments)
MISSING_OPTIONS: Final = _missing(_TABLES.missing_options)
"""Arguments of calls, in the same form."""

MISSING_PARAMETERS: Final = _missing(_TABLES.missing_parameters)
"""Sampling parameters, in the same form."""

IGNORED: Final = _TABLES.ignored
"""Arguments of other constructors that have no effect here."""

FLAGS: Final = _by_name(_TABLES.flags)
"""Flags of other programs -> the flags here; the first one that the command has is suggested."""

OUR_WAY: Final = _by_name(_TABLES.our_way)
"""Name -> the hint of its error. The constructor accepts ``ALIASES``, so their hints are for other places only."""


def by_own_names(
    kind: str, given: Mapping[str, object], aliases: Mapping[str, str], known: Container[str], missing: Missing
) -> tuple[dict[str, object], list[str]]:
    """Return the values of ``known`` names by these names, and the other names. ``aliases``: other name -> name.

    Raises:
        ValueError: a name is given twice, or a value of a ``missing`` name does not switch its feature off.
    """
    values: dict[str, object] = {}
    others: list[str] = []
    for key, value in given.items():
        name = aliases.get(key, key)
        if name in values:
            spellings = " and ".join(repr(key) for key in given if aliases.get(key, key) == name)
            raise ValueError(f"{kind} {name!r} is given twice, as {spellings}")
        if name in known:
            values[name] = value
        elif key in missing:
            checks.off(key, value, *missing[key])
        else:
            others.append(key)
    return values, others


def our_way(name: str) -> str:
    """Return "; " and the hint for this name, or an empty string."""
    return f"; {OUR_WAY[name]}" if name in OUR_WAY else ""


def no_attribute(owner: str, name: str, *, instead: str = "") -> AttributeError:
    """Return the error of ``__getattr__``. ``instead``: the hint for a name that no other engine has."""
    return AttributeError(f"{owner} has no attribute {name!r}{our_way(name) or instead}", name=name)
