"""The sampling parameters of structured output: their checks, and the grammar that they make together."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, cast, get_type_hints

import msgspec

from aioengine.api import checks
from aioengine.constraints.json_schema import MAX_CHARACTERS, OPTIONS, compile_schema
from aioengine.constraints.python_regex import MAX_BYTES as MAX_REGEX_BYTES
from aioengine.constraints.python_regex import escaped, translate
from aioengine.constraints.structural_tag import lark_of
from aioengine.errors import UnsupportedSchemaError
from aioengine.protocol.messages import Grammar

MAX_EBNF_BYTES: Final = 65_536
MAX_CHOICES: Final = 10_000
MAX_CHOICE_BYTES: Final = 131_072
MAX_REASONING_BYTES: Final = 256
MAX_CLASSES: Final = 1024
"""Parts of classes of Unicode; a thousand of them take 0.1 s to compile."""

KINDS: Final = ("json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag")
"""The parameters of which a request may have one."""

JSON_KINDS: Final = ("json_schema", "json_object", "structural_tag")
"""Those that take ``whitespace``."""

_ONE_SPACE: Final = r"[ \n]?"
_ANY_JSON: Final = "$$ANY$$"


# ---------------------------------------------------------------- checks of each parameter


def json_schema(name: str, value: object) -> str:
    """JSON text."""
    value = checks.plain(value)
    if isinstance(value, str):
        return "{}" if value == _ANY_JSON else _not_empty(name, value)
    if isinstance(value, Mapping):
        given = dict(cast("Mapping[str, object]", value))
        if checks.json_size(given, MAX_CHARACTERS) > MAX_CHARACTERS:
            raise ValueError(
                f"{name} has more than {MAX_CHARACTERS:,} characters as JSON, or holds itself; at most these are read"
            )
        try:
            return json.dumps(given, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{name} must hold what JSON can hold: {error}") from None
    if isinstance(value, bool | int | float | list | tuple | bytes):
        raise checks.wrong_type(name, "JSON text, a dict, or a class (pydantic, msgspec or dataclass)", value)
    return _schema_of_type(name, value)


def _schema_of_type(name: str, of: object) -> str:
    kind = type(of)
    if dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct) or hasattr(kind, "model_json_schema"):
        raise TypeError(f"{name} is an object of the class {kind.__name__}; pass the class {kind.__name__} itself")
    try:
        return _made_schema(of)
    except TypeError as error:
        allowed = "JSON text, a dict, or a class (pydantic, msgspec or dataclass)"
        reason = " ".join(str(error).strip().splitlines()[-1:])  # the lines above advise callers of msgspec
        raise TypeError(f"{checks.wrong_type(name, allowed, of)}: {_field_at_fault(of)}{reason}") from error


def _field_at_fault(of: Any, outer: tuple[object, ...] = ()) -> str:
    """The field of a class for whose type no schema can be made, as "Class.field: "; empty if it is no field's.

    outer: the classes in which it stands.
    """
    is_class = isinstance(of, type) and (dataclasses.is_dataclass(of) or issubclass(of, msgspec.Struct))
    for name, hint in get_type_hints(of, include_extras=True).items() if is_class else ():
        if any(hint is each for each in (of, *outer)):
            continue
        try:
            msgspec.json.schema(hint)
        except TypeError:
            return _field_at_fault(hint, (of, *outer)) or f"{of.__name__}.{name}: "
    return ""


@lru_cache(maxsize=64)
def _made_schema(of: Any) -> str:
    """Raises TypeError: no schema can be made of it."""
    make = getattr(of, "model_json_schema", None)
    schema = make() if callable(make) else msgspec.json.schema(of)
    _close(schema)
    return json.dumps(schema)


def _close(schema: object) -> None:
    """The objects of a class have its fields alone, though its schema may not say so."""
    if isinstance(schema, dict):
        given = cast("dict[str, object]", schema)
        if given.get("type") == "object" and isinstance(given.get("properties"), dict):
            given.setdefault("additionalProperties", False)
        for value in given.values():
            _close(value)
    elif isinstance(schema, list):
        for value in cast("list[object]", schema):
            _close(value)


def text(name: str, value: object, max_bytes: int = MAX_EBNF_BYTES) -> str:
    """A string of at least one character."""
    return _not_empty(name, checks.text(name, checks.plain(value), max_bytes=max_bytes))


def _not_empty(name: str, value: str) -> str:
    """An empty text is likelier a mistake (a template without its values) than the wish for no constraint."""
    if not value:
        raise ValueError(f"{name} must have at least one character, got ''; leave it out for no constraint")
    return value


def regex(name: str, value: object) -> str:
    return text(name, value, MAX_REGEX_BYTES)


def choice(name: str, value: object) -> list[str]:
    """At least one string, each with at least one character."""
    entries = checks.sequence(name, value, MAX_CHOICES, allowed="a list of strings")
    found = [checks.text(f"{name}[{place}]", each, max_bytes=MAX_REGEX_BYTES) for place, each in enumerate(entries)]
    if not found or not all(found):
        raise checks.wrong_value(name, "a list of strings that are not empty", value)
    if sum(map(len, found)) > MAX_CHOICE_BYTES:
        raise ValueError(f"{name} has {sum(map(len, found)):,} characters together, at most {MAX_CHOICE_BYTES:,} fit")
    return found


def structural_tag(name: str, value: object) -> str:
    """JSON text."""
    if isinstance(value, Mapping):
        return json_schema(name, value)
    return text(name, value, MAX_CHOICE_BYTES)


def whitespace(name: str, value: object) -> str:
    """ "flexible", or a pattern that matches white space of JSON alone."""
    pattern = checks.text(name, checks.plain(value), max_bytes=MAX_REASONING_BYTES)
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
    """A string, or token ids; neither is empty."""
    value = checks.plain(value)
    if isinstance(value, str):
        return text(name, value, MAX_REASONING_BYTES)
    entries = checks.sequence(name, value, MAX_REASONING_BYTES, allowed="a string or a list of token ids")
    if not entries:
        raise ValueError(f"{name} must have at least one token id, got []; leave it out for no reasoning")
    return [checks.whole(f"{name}[{place}]", each, 0) for place, each in enumerate(entries)]


# ---------------------------------------------------------------- the grammar


def grammar_of(values: Mapping[str, Any], *, ignore_eos: bool) -> Grammar | None:
    """The grammar that the parameters of structured output make together; ``values``: of all of them, None: not given.

    Raises:
        ValueError: they contradict each other, or one is no valid schema, pattern or tag.
        UnsupportedSchemaError: a part could not be enforced.
    """
    kinds = [name for name in KINDS if values[name]]
    if len(kinds) > 1:
        raise ValueError(f"{' and '.join(kinds)} are given together; an output has one constraint: keep one of them")
    space, end, most = values["whitespace"], values["reasoning_end"], values["max_thinking_tokens"]
    if not kinds:
        others = {"whitespace": space, "reasoning_end": end, "max_thinking_tokens": most}
        for name, value in others.items():
            if value is not None:
                known = ", ".join(JSON_KINDS if name == "whitespace" else KINDS)
                raise ValueError(f"{name}={checks.shown(value)} is given without a constraint; add one of {known}")
        return None
    if most is not None and end is None:
        raise ValueError(
            f"max_thinking_tokens={most} is given without reasoning_end, the end of what it bounds; add that"
        )
    name = kinds[0]
    if space is not None and name not in JSON_KINDS:
        raise ValueError(
            f"whitespace={checks.shown(space)} is given with {name}; it is for {', '.join(JSON_KINDS)}: leave it out"
        )
    value = values[name]
    parameter = f"{name}={checks.shown(value)}"
    try:
        kind, made = _made(name, tuple(cast("list[str]", value)) if isinstance(value, list) else value, space)
    except UnsupportedSchemaError as error:
        message = f"{parameter} cannot be enforced: {checks.cut(str(error))}"
        raise UnsupportedSchemaError(message, pointer=error.pointer, keyword=error.keyword) from None
    except ValueError as error:
        raise ValueError(f"{parameter}: {checks.cut(str(error))}") from None
    return Grammar(
        kind,
        made,
        ignore_eos=ignore_eos,
        reasoning_end=end if isinstance(end, str) else tuple(cast("list[int]", end or ())),
        max_thinking_tokens=most,
        parameter=parameter,
    )


@lru_cache(maxsize=512)  # of a batch, equal constraints are checked once
def _made(name: str, value: Any, space: str | None) -> tuple[str, str]:
    """``Grammar.kind`` and ``Grammar.text`` of a parameter."""
    kind, made = _written(name, value, space)
    if made.count(r"\p{") > MAX_CLASSES:
        message = r"it has too many classes such as \w that are not ASCII, each of which takes long; write [0-9A-Za-z_]"
        raise UnsupportedSchemaError(message, keyword=name)
    return kind, made


def _written(name: str, value: Any, space: str | None) -> tuple[str, str]:
    if name == "json_schema":
        return "json", _json_grammar(compile_schema(value), space)
    if name == "json_object":
        return "json", _json_grammar({"type": "object"}, space)
    if name == "regex":
        return "regex", translate(value, pointer="")
    if name == "choice":
        table = {ord(char): escaped(ord(char)) for char in set[str]().union(*value)}
        return "regex", "|".join(words.translate(table) for words in value)
    if name == "structural_tag":
        return "lark", lark_of(value, whitespace=_options(space))
    return "ebnf", value


def _json_grammar(schema: Mapping[str, object], space: str | None) -> str:
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": _options(space)}}]})


def _options(space: str | None) -> dict[str, object]:
    """Options of the library, with ``space`` between the tokens of JSON."""
    if space == "flexible":
        return {**OPTIONS, "whitespace_flexible": True}
    if space == "":
        return {**OPTIONS, "whitespace_flexible": False}
    return {**OPTIONS, "whitespace_pattern": _ONE_SPACE if space is None else translate(space, pointer="")}
