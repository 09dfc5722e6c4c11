"""Qwen 3, DeepSeek R1, Magistral and others: an answer begins with reasoning between two tags, such as ``<think>`` and
``</think>``, or the prompt ends with the first tag.
"""

from __future__ import annotations

from typing import ClassVar

import regex

from aioengine.parsing._reader import SPACES, Steps, TextReader
from aioengine.parsing._tools import TEXT, Format, const, either, sequence, token


class ThinkTags:
    """Reasoning between two tags, at the beginning of an answer.

    Attributes:
        special_tokens: special tokens among the tags, which must stay in the output.
    """

    special_tokens: ClassVar[tuple[str, ...]] = ()
    begin: ClassVar[str] = "<think>"
    end: ClassVar[str] = "</think>"

    def is_open(self, prompt: str) -> bool:
        """Return whether the answer to this prompt begins with reasoning, without a tag."""
        return prompt.rstrip().endswith(self.begin)

    def read(self, reader: TextReader, *, is_open: bool) -> Steps[None]:
        """Read an answer to the end of the text, and emit its reasoning and its content."""
        begin = yield from reader.take(regex.compile(SPACES + regex.escape(self.begin)))
        if begin or is_open:
            yield from reader.skip_spaces()
            yield from reader.find(regex.compile(SPACES + regex.escape(self.end)), reader.reasoning)
            yield from reader.skip_spaces()
        yield from reader.rest(reader.content)

    def format_of(self, answer: Format) -> Format:
        """Return the format of an answer that may begin with reasoning.

        If the answer is a sequence that begins with free text, tags that are text need no format, and must not have
        one: the free text could take them.
        """
        if not self.special_tokens and answer.get("elements", [None])[0] == TEXT:
            return answer
        begin, end = (token(text) if text in self.special_tokens else const(text) for text in (self.begin, self.end))
        return either(sequence(begin, TEXT, end, answer), answer)


class MistralThinkTags(ThinkTags):
    """``[THINK]...[/THINK]``, two special tokens."""

    special_tokens = ("[THINK]", "[/THINK]")
    begin = "[THINK]"
    end = "[/THINK]"


PLUGIN = ThinkTags
