"""Hermes, Qwen 2.5, Qwen 3: each call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import regex

from aioengine.parsing._reader import SPACES, Steps, TextReader
from aioengine.parsing._tools import Format, Tool, ToolCallFormat, calls_format, json_tag

_BEGIN: Final = regex.compile(f"{SPACES}<tool_call>")
_END: Final = regex.compile(f"{SPACES}</tool_call>")


class HermesCalls(ToolCallFormat):
    def read(self, reader: TextReader, tools: Sequence[Tool]) -> Steps[None]:
        while begin := (yield from reader.find(_BEGIN, reader.content)):
            text = yield from reader.json_call()
            if text is None:
                yield from reader.end_tags(_END)
            else:
                reader.content(begin[0] + text)

    def format_of(self, tools: Sequence[Tool], *, is_required: bool, is_parallel: bool) -> Format:
        tags = [
            json_tag(f'<tool_call>\n{{"name": {tool.quoted_name}, "arguments": ', tool.schema, "}\n</tool_call>")
            for tool in tools
        ]
        return calls_format(tags, None if is_required else "<tool_call>", is_parallel=is_parallel, separator="\n")


PLUGIN = HermesCalls
