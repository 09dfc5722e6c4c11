"""Llama 3: an answer is one call, ``{"name": ..., "parameters": {...}}``, or has calls after ``<|python_tag|>``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import regex

from aioengine.parsing._reader import SPACES, Steps, TextReader
from aioengine.parsing._tools import Format, Tool, ToolCallFormat, calls_format, either, json_tag

_BEGIN: Final = regex.compile(rf"{SPACES}<\|python_tag\|>")
_SEPARATOR: Final = regex.compile(f"{SPACES};")


def _pattern_without(begin: str) -> str:
    """Return a pattern for texts that do not begin with this text."""
    first = regex.escape(begin[0])
    longer = f"|{first}{_pattern_without(begin[1:])}" if begin[1:] else ""
    return f"(?:[^{first}](?s:.)*{longer})?"


_NO_CALL: Final = _pattern_without('{"name": "')


class Llama3Calls(ToolCallFormat):
    """An object at the beginning of an answer is a call only if its name, which comes first, is the name of a tool."""

    special_tokens = ("<|python_tag|>",)

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

    def format_of(self, tools: Sequence[Tool], *, is_required: bool, is_parallel: bool) -> Format:
        """Return calls or, if none is required, a text that does not begin like one."""
        tags = [json_tag(f'{{"name": {tool.quoted_name}, "parameters": ', tool.schema, "}") for tool in tools]
        calls = calls_format(tags, None, is_parallel=is_parallel, separator="; ")
        return calls if is_required else either(calls, {"type": "regex", "pattern": _NO_CALL})


PLUGIN = Llama3Calls
