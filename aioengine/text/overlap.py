"""Chunks that say where they start: cutting what was already given out, and joining what was not read yet.

Overlap is found by offset, never by comparing strings: text may repeat itself.
"""

from __future__ import annotations

from typing import TypeVar

Part = TypeVar("Part", str, list[int])
"""Text or token ids."""


def trim_to_new(part: Part, offset: int, num_given: int) -> Part:
    """The piece of ``part``, which starts at ``offset``, behind the ``num_given`` characters (or ids) given out.

    Raises:
        ValueError: something between what was given out and ``part`` is missing.
    """
    if offset > num_given:
        raise ValueError(
            f"a chunk starts at {offset}, but only {num_given} came before it: {offset - num_given} are missing"
        )
    return part if offset == num_given else part[num_given - offset :]


class UnreadChunk:
    """The chunks that a reader has not taken yet, merged into one.

    Attributes:
        text_offset: characters before this chunk.
        token_offset: ids before this chunk.
        token_ids: the ids of this chunk.
    """

    __slots__ = ("_num_chars", "_texts", "text_offset", "token_ids", "token_offset")

    def __init__(self, text_offset: int = 0, token_offset: int = 0) -> None:
        self.text_offset = text_offset
        self.token_offset = token_offset
        self.token_ids: list[int] = []
        self._texts: list[str] = []
        self._num_chars = 0

    @property
    def text(self) -> str:
        """The text of this chunk."""
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    def add(self, text: str, text_offset: int, token_ids: list[int], token_offset: int) -> None:
        """Append a chunk; what of it is known already is left out.

        Raises:
            ValueError: a chunk between the last one and this one is missing; nothing was appended then.
        """
        text = trim_to_new(text, text_offset, self.text_offset + self._num_chars)
        token_ids = trim_to_new(token_ids, token_offset, self.token_offset + len(self.token_ids))
        if text:
            self._texts.append(text)
            self._num_chars += len(text)
        self.token_ids += token_ids

    def following(self) -> UnreadChunk:
        """An empty chunk that begins where this one ends; for when this one was read."""
        return UnreadChunk(self.text_offset + self._num_chars, self.token_offset + len(self.token_ids))
