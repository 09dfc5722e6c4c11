"""Tools, and the formats in which models call them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias, cast

from aioengine.api import checks
from aioengine.constraints.json_schema import compile_schema
from aioengine.errors import UnsupportedSchemaError

if TYPE_CHECKING:
    from aioengine.parsing._reader import Steps, TextReader

Json: TypeAlias = dict[str, Any]
Format: TypeAlias = dict[str, Any]
"""A format of a structural tag."""


class Tool(NamedTuple):
    """A function that the model may call. schema: of its arguments, an object."""

    name: str
    schema: Json

    @property
    def quoted_name(self) -> str:
        """The name as JSON text."""
        return json.dumps(self.name, ensure_ascii=False)


class ToolCallFormat:
    """How a family of models writes tool calls.

    Attributes:
        special_tokens: special tokens in the text of calls, which must stay in the output.
        has_reasoning: it also marks reasoning, and reads answers without tools.
        trigger: the text at the beginning of each call. separator: the text between two calls.
    """

    special_tokens: ClassVar[tuple[str, ...]] = ()
    has_reasoning: ClassVar[bool] = False
    trigger: ClassVar[str]
    separator: ClassVar[str] = ""

    def read(self, reader: TextReader, tools: Sequence[Tool]) -> Steps[None]:
        """Read an answer to the end of the text, and give out its content and its tool calls."""
        raise NotImplementedError

    def tag_of(self, tool: Tool) -> Format:
        """Return the tag of a call of this tool."""
        raise NotImplementedError

    def format_of(self, tools: Sequence[Tool], *, is_required: bool, is_parallel: bool) -> Format:
        """Return the format of an answer that may call tools. is_required: it has calls only, and at least one."""
        tags = [self.tag_of(tool) for tool in tools]
        more = {"stop_after_first": not is_parallel, "tags": tags}
        if is_required:
            return {"type": "tags_with_separator", "separator": self.separator, "at_least_one": True, **more}
        return {"type": "triggered_tags", "triggers": [self.trigger], **more}


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
    return [_tool_of(i, cast("Json", tool.get("function", tool))) for i, tool in enumerate(tools)]


def _tool_of(number: int, function: Json) -> Tool:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"tools[{number}] must have a function with a name, got {checks.shown(function)}")
    parameters = function.get("parameters") or {"additionalProperties": False}
    schema: Json = {"type": "object", **parameters} if isinstance(parameters, Mapping) else {}
    if schema.get("type") != "object":
        raise ValueError(f"the parameters of the tool {name!r} must be the schema of an object")
    try:
        compile_schema(json.dumps(schema))
    except UnsupportedSchemaError as error:
        if function.get("strict"):
            message = f"the parameters of the tool {name!r} cannot be enforced: {error}"
            raise UnsupportedSchemaError(message, pointer=error.pointer, keyword=error.keyword) from None
        schema = {"type": "object"}
    return Tool(name, schema)
