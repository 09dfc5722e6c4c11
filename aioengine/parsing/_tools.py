"""Tools, and the formats in which models call them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Final, NamedTuple, Protocol, TypeAlias, cast

from aioengine.api import checks
from aioengine.constraints.json_schema import compile_schema
from aioengine.errors import UnsupportedSchemaError
from aioengine.parsing._reader import Steps, TextReader

Json: TypeAlias = dict[str, Any]
Format: TypeAlias = dict[str, Any]
"""A format of a structural tag."""


ANY_OBJECT: Final[Json] = {"type": "object"}
_TEXTS: Final = ("title", "description", "examples", "default", "$comment")
"""Keywords of a schema for people."""
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value is a dict of schemas."""
_PARTS: Final = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf")
"""Keywords whose value is a schema, or a list of schemas."""


class Tool(NamedTuple):
    """A function that the model may call.

    schema: of its arguments, an object. properties: the schemas of the arguments, even if they cannot be enforced, so
    that ``schema`` allows any object. is_strict: the schema must be enforced.
    """

    name: str
    schema: Json
    properties: Json
    is_strict: bool = False

    @property
    def quoted_name(self) -> str:
        """The name as JSON text."""
        return quoted(self.name)


class ToolCallFormat(Protocol):
    """How a family of models writes tool calls.

    Attributes:
        special_tokens: special tokens in the text of calls, which must stay in the output.
        answer_begin: if the format also marks reasoning: the text after which the answer itself begins. Such a format
            reads answers without tools, too.
    """

    special_tokens: ClassVar[tuple[str, ...]] = ()
    answer_begin: ClassVar[str | None] = None

    def read(self, reader: TextReader, tools: Sequence[Tool]) -> Steps[None]:
        """Read an answer to the end of the text, and emit its content and its tool calls."""
        ...

    def format_of(self, tools: Sequence[Tool], *, is_required: bool, is_parallel: bool) -> Format:
        """Return the format of an answer that may call tools. is_required: it has calls only, and at least one."""
        ...


def calls_format(tags: list[Format], trigger: str | None, *, is_parallel: bool, separator: str = "") -> Format:
    """Return the format of calls, or of text with calls that begin with ``trigger``. separator: the text between two
    calls.
    """
    more = {"stop_after_first": not is_parallel, "tags": tags}
    if trigger is None:
        return {"type": "tags_with_separator", "separator": separator, "at_least_one": True, **more}
    return {"type": "triggered_tags", "triggers": [trigger], **more}


def tag(begin: str, content: Format, end: str) -> Format:
    """Return the format of a text between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def const(text: str) -> Format:
    """Return the format of this text."""
    return {"type": "const_string", "value": text}


def token(text: str) -> Format:
    """Return the format of a special token."""
    return {"type": "token", "token": text}


def json_schema(schema: Json) -> Format:
    """Return the format of JSON."""
    return {"type": "json_schema", "json_schema": schema}


def sequence(*elements: Format) -> Format:
    """Return the format of all of these formats in order."""
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Format) -> Format:
    """Return the format of one of these formats."""
    return {"type": "or", "elements": list(elements)}


def repeated(kind: str, content: Format) -> Format:
    """Return the format of a repetition. kind: ``"optional"``, ``"star"`` or ``"plus"``."""
    return {"type": kind, "content": content}


TEXT: Final[Format] = {"type": "any_text"}


def quoted(text: str) -> str:
    """Return a text as JSON."""
    return json.dumps(text, ensure_ascii=False)


def json_tag(begin: str, schema: Json, end: str) -> Format:
    """Return the format of JSON between two texts."""
    return tag(begin, json_schema(schema), end)


def tools_of(tools: Iterable[Mapping[str, Any]]) -> list[Tool]:
    """Return tools that are given in the form of chat templates: ``{"type": "function", "function": {"name": ...}}``.

    A schema that cannot be enforced is replaced by any object, unless the function has ``"strict": True``.

    Raises:
        ValueError: a tool has no name, or its parameters are not the schema of an object.
        UnsupportedSchemaError: the schema of a strict function cannot be enforced.
    """
    return [_tool_of(i, tool) for i, tool in enumerate(tools)]


def function_of(value: object) -> Json:
    """Return the ``function`` of a tool or a tool choice, else the dict itself; empty: the value has another form."""
    outer = cast("Json", value) if isinstance(value, Mapping) else {}
    function: object = outer.get("function") or outer
    return cast("Json", function) if isinstance(function, Mapping) else {}


def _tool_of(number: int, tool: object) -> Tool:
    function = function_of(tool)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"tools[{number}] must have a function with a name, got {checks.shown(tool)}")
    parameters = function.get("parameters") or {"additionalProperties": False}
    try:
        schema: Json = _without_texts({"type": "object", **parameters}) if isinstance(parameters, Mapping) else {}
        text = json.dumps(schema)
    except RecursionError:
        raise ValueError(f"the parameters of the tool {name!r} are nested too deeply") from None
    if schema.get("type") != "object":
        raise ValueError(f"the parameters of the tool {name!r} must be the schema of an object")
    properties: Json = schema.get("properties") or {}
    is_strict = bool(function.get("strict"))
    error = _refusal(text)
    if error is None:
        return Tool(name, schema, properties, is_strict)
    if not isinstance(error, UnsupportedSchemaError):
        raise ValueError(f"the parameters of the tool {name!r} are not a JSON schema: {error}")
    if not is_strict:
        return Tool(name, ANY_OBJECT, properties)
    message = f"the parameters of the tool {name!r} cannot be enforced: {error}"
    raise UnsupportedSchemaError(message, pointer=error.pointer, keyword=error.keyword)


@lru_cache(maxsize=1024)  # requests repeat their tools
def _refusal(schema: str) -> ValueError | None:
    """Return the reason why a schema cannot be enforced, or None."""
    try:
        compile_schema(schema)
    except ValueError as error:
        return error
    return None


def _without_texts(schema: Json) -> Json:
    """Return a schema without descriptions, which take most of its size. Names of properties are kept."""
    kept: Json = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            kept[key] = {name: _part(part) for name, part in cast("Json", value).items()}
        elif key in _PARTS:
            kept[key] = list(map(_part, cast("list[Any]", value))) if isinstance(value, list) else _part(value)
        elif key not in _TEXTS:
            kept[key] = value
    return kept


def _part(value: Any) -> Any:
    return _without_texts(cast("Json", value)) if isinstance(value, dict) else value
