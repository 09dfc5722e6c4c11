"""The sampling parameters of structured output: their checks, and the grammar that they define together."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, cast

import msgspec

from aioengine.api import checks
from aioengine.constraints.json_schema import MAX_CHARACTERS, OPTIONS, compile_schema
from aioengine.constraints.python_regex import MAX_BYTES as MAX_REGEX_BYTES
from aioengine.constraints.python_regex import escaped, translate
from aioengine.constraints.structural_tag import MAX_BYTES as MAX_TAG_BYTES
from aioengine.constraints.structural_tag import lark_of
from aioengine.errors import UnsupportedSchemaError
from aioengine.protocol.messages import Grammar

MAX_EBNF_BYTES: Final = 65_536
MAX_CHOICES: Final = 10_000
MAX_CHOICE_CHARACTERS: Final = 131_072
MAX_REASONING_BYTES: Final = 256
MAX_WHITESPACE_BYTES: Final = 256
MAX_CLASSES: Final = 1024
"""Unicode classes in a compiled grammar. A thousand of them take 0.1 s to compile."""

KINDS: Final = ("json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag")
"""A request may have one of these parameters."""

JSON_KINDS: Final = ("json_schema", "json_object", "structural_tag")
"""Parameters that may be combined with ``whitespace``."""

_ONE_SPACE: Final = r"[ \n]?"
_ANY_JSON: Final = "$$ANY$$"
"""The value with which callers of SGLang ask for any JSON value."""


# ---------------------------------------------------------------- checks of each parameter


def json_schema(name: str, value: object) -> str:
    """Return a schema as JSON text."""
    value = checks.plain(value)
    if isinstance(value, str):
        return "{}" if value == _ANY_JSON else _not_empty(name, value)
    if isinstance(value, Mapping):
        schema = dict(cast("Mapping[str, object]", value))
        if checks.json_size(schema, MAX_CHARACTERS) > MAX_CHARACTERS:
            raise ValueError(
                f"{name} has more than {MAX_CHARACTERS:,} characters as JSON, which is the limit, or contains itself"
            )
        try:
            return json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{name} cannot be written as JSON: {error}") from None
    wrong_type = checks.wrong_type(name, "JSON text, a dict, or a class (pydantic, msgspec or dataclass)", value)
    if isinstance(value, bool | int | float | list | tuple | bytes):
        raise wrong_type
    kind = type(value)
    if dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct) or hasattr(kind, "model_json_schema"):
        raise TypeError(f"{name} is an object of the class {kind.__name__}; pass the class {kind.__name__} itself")
    try:
        return _schema_of_class(value)
    except TypeError as error:
        reason = " ".join(str(error).strip().splitlines()[-1:])  # the lines above advise callers of msgspec
        raise TypeError(f"{wrong_type}: {reason}") from error


@lru_cache(maxsize=64)
def _schema_of_class(value: Any) -> str:
    """Return the schema of a class as JSON text. Raises TypeError if it has none."""
    make = getattr(value, "model_json_schema", None)
    schema = make() if callable(make) else msgspec.json.schema(value)
    _forbid_other_properties(schema)
    return json.dumps(schema)


def _forbid_other_properties(schema: object) -> None:
    """Forbid properties that are not fields of a class, unless its schema allows them."""
    if isinstance(schema, dict):
        keywords = cast("dict[str, object]", schema)
        if keywords.get("type") == "object" and isinstance(keywords.get("properties"), dict):
            keywords.setdefault("additionalProperties", False)
        for value in keywords.values():
            _forbid_other_properties(value)
    elif isinstance(schema, list):
        for value in cast("list[object]", schema):
            _forbid_other_properties(value)


def text(name: str, value: object, max_bytes: int = MAX_EBNF_BYTES) -> str:
    """Check a string that is not empty."""
    return _not_empty(name, checks.text(name, checks.plain(value), max_bytes=max_bytes))


def _not_empty(name: str, value: str) -> str:
    """Refuse an empty string. It is more likely a mistake (an unset template) than the wish for no constraint."""
    if not value:
        raise ValueError(f"{name} must have at least one character, got ''; leave it out for no constraint")
    return value


def regex(name: str, value: object) -> str:
    return text(name, value, MAX_REGEX_BYTES)


def choice(name: str, value: object) -> list[str]:
    """Check a list of strings that are not empty."""
    entries = checks.sequence(name, value, MAX_CHOICES, allowed="a list of strings")
    choices = [checks.text(f"{name}[{i}]", entry, max_bytes=MAX_REGEX_BYTES) for i, entry in enumerate(entries)]
    if not choices or not all(choices):
        raise checks.wrong_value(name, "a list of strings that are not empty", value)
    size = sum(map(len, choices))
    if size > MAX_CHOICE_CHARACTERS:
        raise ValueError(f"{name} has {size:,} characters together; at most {MAX_CHOICE_CHARACTERS:,} are allowed")
    return choices


def structural_tag(name: str, value: object) -> str:
    """Return a structural tag as JSON text."""
    return json_schema(name, value) if isinstance(value, Mapping) else text(name, value, MAX_TAG_BYTES)


def whitespace(name: str, value: object) -> str:
    """Check "flexible", or a pattern that only matches whitespace of JSON."""
    pattern = checks.text(name, checks.plain(value), max_bytes=MAX_WHITESPACE_BYTES)
    if pattern != "flexible":
        plain = re.sub(r"\\[tnr]", " ", re.sub(r"\{\d*,?\d*\}", "", pattern.replace("(?:", "(")))
        if re.fullmatch(r"[ \t\n\r\[\]()|?*+]*", plain) is None:
            raise checks.wrong_value(name, "'flexible', or a pattern of space, \\t, \\n and \\r", value)
        try:
            translate(pattern, pointer="")
        except ValueError as error:
            raise ValueError(f"{name}={checks.shown(pattern)}: {error}") from None
    return pattern


def reasoning_end(name: str, value: object) -> str | list[int]:
    """Check a string or a list of token ids, not empty."""
    value = checks.plain(value)
    if isinstance(value, str):
        return text(name, value, MAX_REASONING_BYTES)
    entries = checks.sequence(name, value, MAX_REASONING_BYTES, allowed="a string or a list of token ids")
    if not entries:
        raise ValueError(f"{name} must have at least one token id, got []; leave it out for no reasoning")
    return [checks.whole(f"{name}[{i}]", entry, 0) for i, entry in enumerate(entries)]


# ---------------------------------------------------------------- the grammar


def grammar_of(values: Mapping[str, Any], *, ignore_eos: bool) -> Grammar | None:
    """Return the grammar that the parameters of structured output define together.

    values: the value of each parameter; None: not set.

    Raises:
        ValueError: they contradict each other, or one is not a valid schema, pattern or tag.
        UnsupportedSchemaError: a part cannot be enforced.
    """
    kinds = [name for name in KINDS if values[name]]
    if len(kinds) > 1:
        raise ValueError(f"{' and '.join(kinds)} are given together; an output has one constraint: keep one")
    space, end, max_thinking = values["whitespace"], values["reasoning_end"], values["max_thinking_tokens"]
    if not kinds:
        for name in ("whitespace", "reasoning_end", "max_thinking_tokens"):
            if values[name] is not None:
                known, value = ", ".join(JSON_KINDS if name == "whitespace" else KINDS), checks.shown(values[name])
                raise ValueError(f"{name}={value} is given without a constraint; add one of {known}")
        return None
    if max_thinking is not None and end is None:
        raise ValueError(f"max_thinking_tokens={max_thinking} is given without reasoning_end; add it")
    name = kinds[0]
    if space is not None and name not in JSON_KINDS:
        raise ValueError(
            f"whitespace={checks.shown(space)} is given with {name}; it is for {', '.join(JSON_KINDS)}: leave it out"
        )
    value = values[name]
    parameter = f"{name}={checks.shown(value)}"
    try:
        kind, grammar = _compile(name, tuple(cast("list[str]", value)) if isinstance(value, list) else value, space)
    except UnsupportedSchemaError as error:
        message = f"{parameter} cannot be enforced: {checks.cut(str(error))}"
        raise UnsupportedSchemaError(message, pointer=error.pointer, keyword=error.keyword) from None
    except ValueError as error:
        raise ValueError(f"{parameter}: {checks.cut(str(error))}") from None
    return Grammar(
        kind,
        grammar,
        ignore_eos=ignore_eos,
        reasoning_end=end if isinstance(end, str) else tuple(cast("list[int]", end or ())),
        max_thinking_tokens=max_thinking,
        parameter=parameter,
    )


@lru_cache(maxsize=512)  # equal constraints of a batch are checked once
def _compile(name: str, value: Any, space: str | None) -> tuple[str, str]:
    """Return ``Grammar.kind`` and ``Grammar.text`` of a parameter. space: the value of ``whitespace``."""
    options: dict[str, object] = dict(OPTIONS)
    if space in ("flexible", ""):
        options["whitespace_flexible"] = space == "flexible"
    else:
        options["whitespace_pattern"] = _ONE_SPACE if space is None else translate(space, pointer="")
    if name in ("json_schema", "json_object"):
        schema = compile_schema(value) if name == "json_schema" else {"type": "object"}
        kind, grammar = "json", json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": options}}]})
    elif name == "regex":
        kind, grammar = "regex", translate(value, pointer="")
    elif name == "choice":
        table = {ord(char): escaped(ord(char)) for char in set[str]().union(*value)}
        kind, grammar = "regex", "|".join(entry.translate(table) for entry in value)
    elif name == "structural_tag":
        kind, grammar = "lark", lark_of(value, whitespace=options)
    else:
        kind, grammar = "ebnf", value
    if grammar.count(r"\p{") > MAX_CLASSES:
        message = r"it has too many Unicode classes such as \w, which take long to compile; write [0-9A-Za-z_]"
        raise UnsupportedSchemaError(message, keyword=name)
    return kind, grammar
