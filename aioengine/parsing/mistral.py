"""Mistral: ``[TOOL_CALLS]`` before a list of calls in JSON or, in newer models, before each ``name[ARGS]{...}``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import regex

from aioengine.parsing._reader import SPACES, Steps, TextReader
from aioengine.parsing._tools import (
    TEXT,
    Format,
    Tool,
    ToolCallFormat,
    calls_format,
    const,
    either,
    json_schema,
    json_tag,
    repeated,
    sequence,
    token,
)

_BEGIN: Final = regex.compile(rf"{SPACES}\[TOOL_CALLS\]")
_NAME: Final = regex.compile(
    rf"{SPACES}([^\s\[\]{{}}\"]{{1,256}})(?:\[CALL_ID\][^\s\[\]{{}}]{{1,64}})?(?:\[ARGS\])?{SPACES}\{{"
)
_LIST: Final = regex.compile(rf"{SPACES}\[")
_COMMA: Final = regex.compile(f"{SPACES},")
_LIST_END: Final = regex.compile(rf"{SPACES}\]")


class MistralCalls(ToolCallFormat):
    special_tokens = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def read(self, reader: TextReader, tools: Sequence[Tool]) -> Steps[None]:
        while begin := (yield from reader.find(_BEGIN, reader.content)):
            name = yield from reader.take(_NAME)
            if name is not None:
                yield from reader.call(name[1])
                yield from reader.skip_spaces()
            elif (bracket := (yield from reader.take(_LIST))) is not None:
                yield from _read_list(reader, begin[0] + bracket[0])
            else:
                reader.content(begin[0])

    def format_of(self, tools: Sequence[Tool], *, is_required: bool, is_parallel: bool) -> Format:
        """Return both forms, because the model knows which is its own."""
        items = [json_tag(f'{{"name": {tool.quoted_name}, "arguments": ', tool.schema, "}") for tool in tools]
        call = either(*(sequence(const(tool.name), token("[ARGS]"), json_schema(tool.schema)) for tool in tools))
        in_list = calls_format(items, None, is_parallel=is_parallel, separator=", ")
        calls = either(
            sequence(either(const("["), const(" [")), in_list, const("]")),
            sequence(call, *([repeated("star", sequence(token("[TOOL_CALLS]"), call))] if is_parallel else [])),
        )
        answer = sequence(token("[TOOL_CALLS]"), calls)
        return answer if is_required else sequence(TEXT, repeated("optional", answer))


def _read_list(reader: TextReader, before: str) -> Steps[None]:
    """Read the calls of a list. before: the text to emit before text that is no call."""
    while (text := (yield from reader.json_call())) is None:
        comma = yield from reader.take(_COMMA)
        if comma is None:
            yield from reader.end_tags(_LIST_END)
            return
        before = comma[0]
    reader.content(before + text)


PLUGIN = MistralCalls
