"""gpt-oss: an answer is a sequence of messages in channels (the harmony format).

A message is ``<|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>``; the prompt ends with the first
``<|start|>assistant``. The channel ``analysis`` is reasoning. A message to ``functions.NAME`` is a tool call; its
recipient is in the part of the role or of the channel. All other messages are content.
"""

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
    const,
    either,
    json_schema,
    repeated,
    sequence,
    token,
)

_RECIPIENT: Final = r" to=(?:functions\.)?[^\s<]{1,256}"
_HEADER: Final = regex.compile(
    rf"(?:<\|start\|>assistant)?({_RECIPIENT})?<\|channel\|>(\w{{1,32}})({_RECIPIENT})?"
    r" ?(?:<\|constrain\|>)? ?\w{0,32}<\|message\|>"
)
_END: Final = regex.compile(r"<\|(?:end|call|return)\|>")
_BRACE: Final = regex.compile(rf"{SPACES}\{{")
_FUNCTIONS: Final = " to=functions."


class GptOssMessages(ToolCallFormat):
    special_tokens = (
        "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>",
    )  # fmt: skip
    answer_begin = "<|channel|>final<|message|>"

    def read(self, reader: TextReader, tools: Sequence[Tool]) -> Steps[None]:
        while header := (yield from reader.find(_HEADER, reader.content)):
            recipient = header[1] or header[3] or ""
            if recipient.startswith(_FUNCTIONS) and tools:
                brace = yield from reader.take(_BRACE)
                if brace is not None:
                    yield from reader.call(recipient.removeprefix(_FUNCTIONS))
                    yield from reader.skip_spaces()
                    yield from reader.take(_END)
                    continue
                reader.content(header[0])
            emit = reader.reasoning if header[2] == "analysis" else reader.content
            yield from reader.find(_END, emit)

    def format_of(self, tools: Sequence[Tool], *, is_required: bool, is_parallel: bool) -> Format:
        """Return messages that end with a call or, if none is required, with an answer. There is only one call, because
        the model stops after it.
        """
        end = sequence(token("<|end|>"), token("<|start|>"), const("assistant"))
        thoughts = repeated("star", sequence(either(_message("analysis", TEXT), _message("commentary", TEXT)), end))
        calls = [
            sequence(
                token("<|channel|>"),
                const(f"commentary to=functions.{tool.name} "),
                token("<|constrain|>"),
                const("json"),
                token("<|message|>"),
                json_schema(tool.schema),
            )
            for tool in tools
        ]
        return sequence(thoughts, either(*calls, *([] if is_required else [_message("final", TEXT)])))


def _message(channel: str, text: Format) -> Format:
    return sequence(token("<|channel|>"), const(channel), token("<|message|>"), text)


PLUGIN = GptOssMessages
