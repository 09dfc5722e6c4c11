"""Qwen 3 Coder, Qwen 3.5 and others: calls in tags, with one tag for each argument.

``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``. Strings are written as they are,
other values as JSON. The schema of the tool says which values are strings.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, cast

import regex

from aioengine.parsing._reader import SPACES, Steps, TextReader
from aioengine.parsing._tools import (
    Format,
    Json,
    Tool,
    ToolCallFormat,
    calls_format,
    const,
    either,
    json_tag,
    quoted,
    repeated,
    sequence,
    tag,
)

_BEGIN: Final = regex.compile(rf"{SPACES}(?:<tool_call>{SPACES})?<function=([^<>\s]{{1,256}})>")
_NEXT: Final = regex.compile(rf"{SPACES}(?:<parameter=([^<>\r\n]{{1,256}})>|</function>)")
_LINE: Final = regex.compile(r"\n")
_VALUE_END: Final = regex.compile(r"\n?</parameter>")
_END: Final = regex.compile(f"{SPACES}</tool_call>")
_CALL_END: Final = "</function>\n</tool_call>"
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
"""Some chat templates write these values as Python does, and models repeat it."""
_JSON_TYPES: Final[dict[type[object], str]] = {
    dict: "object",
    list: "array",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
}


class Qwen3CoderCalls(ToolCallFormat):
    def read(self, reader: TextReader, tools: Sequence[Tool]) -> Steps[None]:
        schemas = {tool.name: tool.properties for tool in tools}
        while begin := (yield from reader.find(_BEGIN, reader.content)):
            part = yield from reader.take(_NEXT)
            if part is None:
                reader.content(begin[0])
                continue
            reader.begin_call(begin[1])
            before = "{"
            while part is not None and part[1] is not None:
                reader.arguments(f"{before}{quoted(part[1])}: ")
                before = ", "
                yield from _read_value(reader, _types(schemas.get(begin[1], {}).get(part[1])))
                part = yield from reader.take(_NEXT)
            if part is not None or not reader.is_over:
                reader.arguments("{}" if before == "{" else "}")
            reader.end_call()
            yield from reader.end_tags(_END)

    def format_of(self, tools: Sequence[Tool], *, is_required: bool, is_parallel: bool) -> Format:
        tags = [
            tag("<tool_call>\n", sequence(const(f"<function={tool.name}>\n"), *_arguments(tool.schema)), _CALL_END)
            for tool in tools
        ]
        return calls_format(tags, None if is_required else "<tool_call>", is_parallel=is_parallel, separator="\n")


_STRING: Final[Format] = {"type": "any_text", "excludes": ["</parameter>"]}
_ANY_ARGUMENT: Final = tag(
    "<parameter=",
    sequence({"type": "regex", "pattern": r"[^<>\r\n]{1,256}"}, const(">\n"), _STRING),
    "\n</parameter>\n",
)


def _arguments(schema: Json) -> list[Format]:
    """Return the formats of the arguments of a tool."""
    names: Json = schema.get("properties") or {}
    required = schema.get("required") or ()
    if names or schema.get("additionalProperties") is False:
        return [_argument(name, schema, is_required=name in required) for name in names]
    return [repeated("star", _ANY_ARGUMENT)]


def _argument(name: str, schema: Json, *, is_required: bool) -> Format:
    """Return the format of an argument. Of strings, only ``enum`` and ``const`` are enforced."""
    value: Any = schema["properties"][name]
    begin, end = f"<parameter={name}>\n", "\n</parameter>\n"
    types = _types(value)
    if types == {"string"}:
        texts = value.get("enum") or ([value["const"]] if "const" in value else [])
        argument = tag(begin, either(*map(const, texts)) if texts else _STRING, end)
    elif types == {"string", "null"} and "enum" not in value:
        argument = tag(begin, _STRING, end)
    else:
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        argument = json_tag(begin, {**value, **definitions} if isinstance(value, dict) else value, end)
    return argument if is_required else repeated("optional", argument)


def _types(schema: object) -> set[str]:
    """Return the types of JSON that a schema names; empty: it names none."""
    if not isinstance(schema, dict):
        return set()
    keywords = cast("Json", schema)
    if "type" in keywords:
        return set(map(str, _list(keywords["type"])))
    branches = [branch for key in ("anyOf", "oneOf") for branch in _list(keywords.get(key, []))]
    values = [*_list(keywords.get("enum", [])), *([keywords["const"]] if "const" in keywords else [])]
    return set[str]().union(*map(_types, branches), map(_type_of, values))


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _type_of(value: object) -> str:
    return _JSON_TYPES.get(type(value), "null")


def _read_value(reader: TextReader, types: set[str]) -> Steps[None]:
    """Read a value, and give it out as JSON. A string comes out piece by piece. types: the types in its schema."""
    yield from reader.take(_LINE)
    if types == {"string"}:
        reader.arguments('"')
        end = yield from reader.find(_VALUE_END, lambda text: reader.arguments(quoted(text)[1:-1]))
        reader.arguments('"' if end else "")
        return
    pieces: list[str] = []
    end = yield from reader.find(_VALUE_END, pieces.append)
    text = "".join(pieces)
    reader.arguments(_json_of(text, types) if end else text)


def _json_of(text: str, types: set[str]) -> str:
    """Return a value as JSON text. A text is a string if it is no JSON of the allowed types."""
    word = _PYTHON_WORDS.get(text.strip(), text.strip())
    try:
        value = json.loads(word, parse_constant=int)  # NaN and Infinity are no JSON: ValueError
    except (ValueError, RecursionError):
        return quoted(text)
    kind = _type_of(value)
    fits = not types or kind in types or "string" not in types or (kind == "integer" and "number" in types)
    return word if fits else quoted(text)


PLUGIN = Qwen3CoderCalls
