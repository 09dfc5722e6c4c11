"""Qwen 3, DeepSeek R1 and others: an answer begins with ``<think>...</think>``, or its prompt ends with ``<think>``."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import regex

from aioengine.parsing._reader import SPACES

if TYPE_CHECKING:
    from aioengine.parsing._reader import Steps, TextReader


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
        """Read an answer to the end of the text, and give out its reasoning and its content."""
        begin = yield from reader.take(regex.compile(SPACES + regex.escape(self.begin)))
        if begin or is_open:
            yield from reader.skip_spaces()
            yield from reader.find(regex.compile(SPACES + regex.escape(self.end)), reader.reasoning)
            yield from reader.skip_spaces()
        yield from reader.rest(reader.content)


PLUGIN = ThinkTags
