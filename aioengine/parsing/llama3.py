"""Llama 3: an answer is one call, ``{"name": ..., "parameters": {...}}``, or has calls after ``<|python_tag|>``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import regex

from aioengine.parsing._reader import SPACES
from aioengine.parsing._tools import Format, Tool, ToolCallFormat, json_tag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioengine.parsing._reader import Steps, TextReader

_BEGIN: Final = regex.compile(rf"{SPACES}<\|python_tag\|>")
_SEPARATOR: Final = regex.compile(f"{SPACES};")


class Llama3Calls(ToolCallFormat):
    """An object at the beginning of an answer is a call only if its name, which comes first, is the name of a tool."""

    special_tokens = ("<|python_tag|>",)
    trigger = '{"name": "'
    separator = "; "

    def read(self, reader: TextReader, tools: Sequence[Tool]) -> Steps[None]:
        names = {tool.name for tool in tools}
        before = ""
        while True:
            text = yield from reader.json_call(names)
            if text is None:
                separator = yield from reader.take(_SEPARATOR)
                before = separator[0] if separator else ""
                yield from reader.skip_spaces()
                continue
            reader.content(before + text)
            begin = yield from reader.find(_BEGIN, reader.content)
            if begin is None:
                return
            before = begin[0]

    def tag_of(self, tool: Tool) -> Format:
        return json_tag(f'{{"name": {tool.quoted_name}, "parameters": ', tool.schema, "}")


PLUGIN = Llama3Calls
