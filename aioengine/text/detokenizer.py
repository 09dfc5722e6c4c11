"""Incremental decoding: token ids are pushed as they arrive, and text is returned as soon as it is certain.

The text of a request is the text that its output tokens add to the decoded prompt. So the first output token is
decoded with the end of the prompt as its context. A leading space is kept, and no text of the prompt is returned. A
character that begins in the prompt and ends in the output belongs to the output.

The bytes of an incomplete character are held back. If bytes are invalid, each maximal subpart of a character (Unicode,
chapter 3, "U+FFFD Substitution of Maximal Subparts") becomes one U+FFFD, as soon as that is certain. If the prompt ends
inside a character and the output does not complete it, the character belongs to the prompt and adds no text.

The text does not depend on how the ids are split into pushes.

``TextPipeline`` decodes the ids of one request and searches the text for stops. Answers without streaming use the same
pipeline, so the joined pieces of a stream equal the answer without streaming.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aioengine.text.token_table import DecoderRule, TokenTable

if TYPE_CHECKING:
    from aioengine.text.stop import StopMatcher

NUM_CONTEXT_TOKENS = 16
"""The number of ids from the end of a prompt that decoding needs as context."""

_REPLACEMENT = "\ufffd"
_REPLACEMENT_BYTES = _REPLACEMENT.encode()
_SURROGATES = b"\xed\xa0"  # up to ED BF: the start of a surrogate, which UTF-8 does not allow
_MAX_INCOMPLETE = 3  # bytes of an incomplete character
_WINDOW = 16  # minimum number of ids that WindowDetokenizer keeps and decodes again with each new id


Decode = Callable[[Sequence[int]], str]
"""Decodes ids to text, as a tokenizer's ``decode`` does, with or without special tokens."""


class TableDetokenizer:
    """Decodes the output ids of one request. It looks up the text of each token in a table."""

    def __init__(self, table: TokenTable, prompt_ids: Sequence[int] = ()) -> None:
        """prompt_ids: the prompt, or its last ids."""
        self._table = table
        self._is_first = table.has_first_rule
        self._num_to_strip = table.num_stripped
        self._pending = b""
        self._pending_is_from_prompt = False
        self._uses_table = False  # nothing pending, and not at the beginning: the text of a token is its table entry
        for token_id in prompt_ids:  # until the rules for the beginning of a text no longer apply
            if not (self._is_first or self._num_to_strip):
                break
            self._decode((token_id,))
        self._pending = self._incomplete_bytes(prompt_ids)
        self._pending_is_from_prompt = bool(self._pending)
        self._uses_table = self._can_use_table()

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids. Return the new text that later ids cannot change."""
        if self._uses_table and len(token_ids) == 1:
            piece = self._table[token_ids[0]]
            if isinstance(piece, str):
                return piece
        return self._decode(token_ids)

    def flush(self) -> str:
        """Return U+FFFD for an incomplete character of the output. Call this after the last id."""
        text = _REPLACEMENT if self._pending and not self._pending_is_from_prompt else ""
        self._pending = b""
        self._uses_table = self._can_use_table()
        return text

    def _can_use_table(self) -> bool:
        return not (self._pending or self._is_first or self._num_to_strip)

    def _decode(self, token_ids: Sequence[int]) -> str:
        """Decode by joining bytes, as needed at the beginning of a text and after an incomplete character."""
        pieces = [self._pending]
        for token_id in token_ids:
            piece: str | bytes | None = self._table[token_id]
            if self._is_first:
                piece = self._table.first(token_id)
                self._is_first = piece is None
            pieces.append(piece.encode() if isinstance(piece, str) else piece or b"")
        data = b"".join(pieces)
        text, self._pending = _decode_utf8(data)
        if text and self._num_to_strip:
            text = self._strip(text)
        if self._pending_is_from_prompt and len(self._pending) < len(data):
            self._pending_is_from_prompt = False
            if text.startswith(_REPLACEMENT) and not data.startswith(_REPLACEMENT_BYTES):
                text = text[1:]  # it stands for the character of the prompt that the output did not complete
        self._uses_table = self._can_use_table()
        return text

    def _strip(self, text: str) -> str:
        """Remove the characters that the tokenizer's decoder strips from the beginning of a text."""
        while self._num_to_strip and text.startswith(self._table.stripped):
            text = text[1:]
            self._num_to_strip -= 1
        if text:
            self._num_to_strip = 0
        return text

    def _incomplete_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        """Return the bytes of an incomplete character at the end of the prompt."""
        tail = b""
        for token_id in reversed(prompt_ids):
            piece = self._table[token_id]
            if isinstance(piece, str):
                if piece:
                    break
                continue
            tail = piece + tail
            if len(tail) >= _MAX_INCOMPLETE:
                break
        return _decode_utf8(tail)[1]


class WindowDetokenizer:
    """Decodes the output ids of one request with any decode function. For each token, it decodes the last ids again and
    compares the texts.

    U+FFFD at the end of the decoded text may stand for an incomplete character, whose bytes are in at most three ids.
    The number of U+FFFD is not the number of ids: some decoders write one per byte, others one per run of bytes.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int] = ()) -> None:
        """prompt_ids: the prompt, or its last ids."""
        self._decode = decode
        self._window = list(prompt_ids[-4 * _WINDOW :])
        self._text = decode(self._window) if self._window else ""
        self._num_incomplete = 0  # ids since the decoded text last ended with a complete character
        text = self._text
        while text.endswith(_REPLACEMENT) and self._num_incomplete < min(_MAX_INCOMPLETE, len(self._window)):
            self._num_incomplete += 1
            text = decode(self._window[: -self._num_incomplete])
        self._num_returned = len(text.rstrip(_REPLACEMENT))
        self._num_from_prompt = len(self._text) - self._num_returned  # U+FFFD at the end of the decoded prompt
        self._shorten_at = 2 * _WINDOW
        self._shorten()

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids. Return the new text that later ids cannot change."""
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Return U+FFFD for an incomplete character of the output. Call this after the last id."""
        return self._text_up_to(len(self._text))

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        self._text = self._decode(self._window)
        text = self._text_up_to(self._certain_length())
        if len(self._window) >= self._shorten_at:
            self._shorten()
        return text

    def _certain_length(self) -> int:
        """Return the length of the decoded text, without U+FFFD that may stand for an incomplete character."""
        if not self._text.endswith(_REPLACEMENT):
            self._num_incomplete = 0
            return len(self._text)
        self._num_incomplete += 1
        if self._num_incomplete > _MAX_INCOMPLETE:
            return len(self._text) - _MAX_INCOMPLETE
        return len(self._text.rstrip(_REPLACEMENT))

    def _text_up_to(self, end: int) -> str:
        """Return the new text up to ``end``, without U+FFFD that belong to the prompt."""
        if end <= self._num_returned:
            return ""
        text = self._text[self._num_returned : end]
        self._num_returned = end
        if self._num_from_prompt:
            text = text.removeprefix(_REPLACEMENT * self._num_from_prompt)
            self._num_from_prompt = 0
        return text

    def _shorten(self) -> None:
        """Drop the oldest ids, if the remaining ids decode to the end of the same text."""
        if self._num_incomplete and len(self._window) < 8 * _WINDOW:
            return  # a cut could split the character; a long window is cut anyway, because invalid bytes may not end
        self._shorten_at = len(self._window) + _WINDOW
        for cut in range(len(self._window) - _WINDOW, 0, -1):
            text = self._decode(self._window[cut:])
            num_lost = len(self._text) - len(text)
            if text and num_lost <= self._num_returned and self._text.endswith(text):
                self._window = self._window[cut:]
                self._text = text
                self._num_returned -= num_lost
                self._shorten_at = 2 * _WINDOW
                return
        without_middle = self._window[:_WINDOW] + self._window[-_WINDOW:]
        if len(without_middle) < len(self._window) and self._decode(without_middle) == self._text:
            # The ids between them have no text.
            self._window = without_middle
            self._shorten_at = 3 * _WINDOW


Detokenizer = TableDetokenizer | WindowDetokenizer


def make_detokenizer(source: TokenTable | Decode, prompt_ids: Sequence[int] = ()) -> Detokenizer:
    """Return a detokenizer for one request. prompt_ids: the prompt, or its last ``NUM_CONTEXT_TOKENS`` ids."""
    if isinstance(source, TokenTable):
        return TableDetokenizer(source, prompt_ids)
    return WindowDetokenizer(source, prompt_ids)


def _decode_utf8(data: bytes) -> tuple[str, bytes]:
    """Return the text of ``data``, and the bytes of an incomplete character at its end."""
    text, num_decoded = utf_8_decode(data, "replace", False)
    rest = data[num_decoded:]
    if len(rest) == 2 and rest >= _SURROGATES and rest[0] == _SURROGATES[0]:
        return text + 2 * _REPLACEMENT, b""  # the codec waits for a third byte, but no byte makes it valid
    return text, rest


class TextPipeline:
    """Decodes the output ids of one request up to a stop. With stops, push ids one by one to find the id that completes
    one.

    The text of an id may be returned by a later ``push``, or by ``flush``. After a stop, all text is dropped.
    """

    def __init__(self, detokenizer: Detokenizer, stops: StopMatcher | None = None) -> None:
        self._detokenizer = detokenizer
        self._stops = stops

    @property
    def matched(self) -> str | None:
        """The stop string or pattern that ended the text, else None."""
        return None if self._stops is None else self._stops.matched

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids, and return the new text. Raises RequestError if a stop pattern took too long."""
        text = self._detokenizer.push(token_ids)
        return text if self._stops is None else self._stops.push(text)

    def flush(self) -> str:
        """Return the rest of the text, after the last id. The rest may contain a stop, which sets ``matched``."""
        text = self._detokenizer.flush()
        return text if self._stops is None else self._stops.push(text) + self._stops.flush()


NO_TEXT = TextPipeline(TableDetokenizer(TokenTable({}, DecoderRule())))
"""The pipeline of requests without a tokenizer: no id has text."""
