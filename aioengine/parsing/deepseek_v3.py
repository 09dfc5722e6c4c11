"""DeepSeek V3, R1 and V3.1: calls between tokens, with arguments in JSON.

V3.1 writes ``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>``. Older models write ``function`` before
the separator, and after it the name and a code block with the arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import regex

from aioengine.parsing._reader import SPACES, Steps, TextReader
from aioengine.parsing._tools import Format, Tool, ToolCallFormat, calls_format, json_tag, tag

_BEGIN: Final = regex.compile(rf"{SPACES}(?:<｜tool▁calls▁begin｜>{SPACES})?<｜tool▁call▁begin｜>")
_NAME: Final = regex.compile(
    rf"{SPACES}(?:function<｜tool▁sep｜>([^\s<]{{1,256}})\n```json|([^\s<]{{1,256}})<｜tool▁sep｜>){SPACES}\{{"
)
_END: Final = regex.compile(rf"{SPACES}(?:```{SPACES})?<｜tool▁call▁end｜>")
_ALL_END: Final = regex.compile(f"{SPACES}<｜tool▁calls▁end｜>")


class DeepseekV3Calls(ToolCallFormat):
    special_tokens = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )

    def read(self, reader: TextReader, tools: Sequence[Tool]) -> Steps[None]:
        while begin := (yield from reader.find(_BEGIN, reader.content)):
            name = yield from reader.take(_NAME)
            if name is None:
                reader.content(begin[0])
                continue
            yield from reader.call(name[1] or name[2])
            yield from reader.end_tags(_END, _ALL_END)

    def format_of(self, tools: Sequence[Tool], *, is_required: bool, is_parallel: bool) -> Format:
        """Return both forms, because the model knows which is its own.

        The published models do not mark the tokens of calls as special, so grammars read them as text.
        """
        calls = [
            json_tag(f"<｜tool▁call▁begin｜>{begin}", tool.schema, f"{end}<｜tool▁call▁end｜>")
            for tool in tools
            for begin, end in (
                (f"{tool.name}<｜tool▁sep｜>", ""),
                (f"function<｜tool▁sep｜>{tool.name}\n```json\n", "\n```"),
            )
        ]
        begin = "<｜tool▁calls▁begin｜>"
        answer = tag(begin, calls_format(calls, None, is_parallel=is_parallel), "<｜tool▁calls▁end｜>")
        return answer if is_required else calls_format([answer], begin, is_parallel=False)


PLUGIN = DeepseekV3Calls
