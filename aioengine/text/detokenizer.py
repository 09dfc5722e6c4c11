"""Incremental decoding: ids go in as they come, text comes out as soon as it is certain.

A request's text is what its output tokens add to the decoded prompt. So the end of the prompt is the context of the
first output token: a leading space stays, no text of the prompt is given out, and a character that the prompt began
and the output finished belongs to the output.

Bytes that can still become a character are held back. Where bytes are invalid, each maximal part of a character
(Unicode, chapter 3, "U+FFFD Substitution of Maximal Subparts") becomes one U+FFFD, as soon as that is certain. What the
prompt began and the output did not finish is the prompt's, and gives nothing.

Both detokenizers are indifferent to how the ids are split into pushes.

``TextPipeline`` is the whole way of one request's text: detokenize, then look for stops. Whole answers are made of the
same stages as streams, so that a stream's pieces, joined, are the whole answer.
"""

from __future__ import annotations

from codecs import utf_8_decode
from typing import TYPE_CHECKING, Protocol

from aioengine.text.token_table import TokenTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioengine.text.stop import StopMatcher
    from aioengine.text.stop_regex import RegexSearch

NUM_CONTEXT_TOKENS = 16
"""The number of ids from the end of a prompt that are enough to decode the output in its place."""

_REPLACEMENT = "\ufffd"
_REPLACEMENT_BYTES = _REPLACEMENT.encode()
_SURROGATES = b"\xed\xa0"  # from here on the second byte makes no character
_MAX_UNFINISHED = 3  # bytes of a character that lacks its last one
_MAX_WINDOW = 16  # ids decoded again for each token, by the detokenizer that has no table


class Decode(Protocol):
    """Decodes ids to text, as a tokenizer's ``decode`` does, with or without special tokens."""

    def __call__(self, token_ids: Sequence[int], /) -> str: ...


class Detokenizer(Protocol):
    """Turns the output ids of one request into its text, piece by piece."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids; return the text that is certain now: often that of one token, sometimes none."""
        ...

    def flush(self) -> str:
        """Return the text that was held back; no more ids will come."""
        ...


def make_detokenizer(source: TokenTable | Decode, prompt_ids: Sequence[int] = ()) -> Detokenizer:
    """Make the detokenizer of one request; ``prompt_ids`` is the prompt or its last ``NUM_CONTEXT_TOKENS`` ids."""
    if isinstance(source, TokenTable):
        return TableDetokenizer(source, prompt_ids)
    return WindowDetokenizer(source, prompt_ids)


class TableDetokenizer:
    """A detokenizer for tokens that can be looked up one by one: a dictionary access for nearly every token."""

    __slots__ = ("_is_first", "_is_plain", "_num_to_strip", "_pending", "_pending_is_prompts", "_table")

    def __init__(self, table: TokenTable, prompt_ids: Sequence[int] = ()) -> None:
        """``prompt_ids``: the prompt, or as much of its end as is known."""
        self._table = table
        self._is_first = table.has_first_rule
        self._num_to_strip = table.num_stripped
        self._pending = b""
        self._pending_is_prompts = False
        self._is_plain = False  # nothing pending and the beginning passed: tokens write what stands in the table
        self._pass_beginning(prompt_ids)
        self._pending = self._unfinished(prompt_ids)
        self._pending_is_prompts = bool(self._pending)
        self._is_plain = self._is_settled()

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids and return the text that has become certain."""
        if self._is_plain and len(token_ids) == 1:
            piece = self._table[token_ids[0]]
            if isinstance(piece, str):
                return piece
        return self._decode(token_ids)

    def flush(self) -> str:
        """Return U+FFFD for output bytes that did not become a character, else nothing."""
        text = _REPLACEMENT if self._pending and not self._pending_is_prompts else ""
        self._pending = b""
        self._is_plain = self._is_settled()
        return text

    def _is_settled(self) -> bool:
        return not (self._pending or self._is_first or self._num_to_strip)

    def _decode(self, token_ids: Sequence[int]) -> str:
        """Decode through bytes: at the beginning of a text, or behind an unfinished character."""
        pieces = [self._pending]
        for token_id in token_ids:
            piece = self._first(token_id) if self._is_first else self._table[token_id]
            pieces.append(piece.encode() if isinstance(piece, str) else piece)
        data = b"".join(pieces)
        text, self._pending = _decode_utf8(data)
        if text and self._num_to_strip:
            text = self._strip(text)
        if self._pending_is_prompts and len(self._pending) < len(data):
            self._pending_is_prompts = False
            if text.startswith(_REPLACEMENT) and not data.startswith(_REPLACEMENT_BYTES):
                text = text[1:]
        self._is_plain = self._is_settled()
        return text

    def _first(self, token_id: int) -> str | bytes:
        piece = self._table.first(token_id)
        self._is_first = piece is None
        return piece or ""

    def _strip(self, text: str) -> str:
        """Remove the characters that the decoder strips from the beginning of a text."""
        while self._num_to_strip and text.startswith(self._table.stripped):
            text = text[1:]
            self._num_to_strip -= 1
        if text:
            self._num_to_strip = 0
        return text

    def _pass_beginning(self, prompt_ids: Sequence[int]) -> None:
        """Decode the beginning of the prompt, up to where its special rules no longer apply."""
        for token_id in prompt_ids:
            if not (self._is_first or self._num_to_strip):
                break
            self._decode((token_id,))

    def _unfinished(self, prompt_ids: Sequence[int]) -> bytes:
        """The bytes at the end of the prompt that can still become a character."""
        tail = b""
        for token_id in reversed(prompt_ids):
            piece = self._table[token_id]
            if isinstance(piece, str):
                if piece:
                    break
                continue
            tail = piece + tail
            if len(tail) >= _MAX_UNFINISHED:
                break
        return _decode_utf8(tail)[1]


class WindowDetokenizer:
    """A detokenizer for any decode function: decodes the last few ids again for each token and compares.

    U+FFFD at the end of a decoding may stand for an unfinished character, which three ids can have begun at most. How
    many there are says nothing: some decoders write one for each byte, and some for all of a run of bytes.
    """

    __slots__ = ("_decode", "_num_given", "_num_prompts", "_num_unfinished", "_shorten_at", "_text", "_window")

    def __init__(self, decode: Decode, prompt_ids: Sequence[int] = ()) -> None:
        """``prompt_ids``: the prompt, or as much of its end as is known."""
        self._decode = decode
        self._window = list(prompt_ids[-4 * _MAX_WINDOW :])
        self._text = decode(self._window) if self._window else ""
        self._num_unfinished = 0  # ids since the decoding last ended with a character
        text = self._text
        while text.endswith(_REPLACEMENT) and self._num_unfinished < min(_MAX_UNFINISHED, len(self._window)):
            self._num_unfinished += 1
            text = decode(self._window[: -self._num_unfinished])
        self._num_given = len(text.rstrip(_REPLACEMENT))
        self._num_prompts = len(self._text) - self._num_given  # U+FFFD that the prompt shows already
        self._shorten_at = 2 * _MAX_WINDOW
        self._shorten()

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next ids and return the text that has become certain."""
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Return U+FFFD for output bytes that did not become a character, else nothing."""
        return self._give(len(self._text))

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        self._text = self._decode(self._window)
        text = self._give(self._certain_length())
        if len(self._window) >= self._shorten_at:
            self._shorten()
        return text

    def _certain_length(self) -> int:
        """The length of the decoded text without bytes that may belong to an unfinished character."""
        if not self._text.endswith(_REPLACEMENT):
            self._num_unfinished = 0
            return len(self._text)
        self._num_unfinished += 1
        if self._num_unfinished > _MAX_UNFINISHED:
            return len(self._text) - _MAX_UNFINISHED
        return len(self._text.rstrip(_REPLACEMENT))

    def _give(self, end: int) -> str:
        if end <= self._num_given:
            return ""
        text = self._text[self._num_given : end]
        self._num_given = end
        if self._num_prompts:
            prompts = _REPLACEMENT * self._num_prompts
            self._num_prompts = 0
            if text.startswith(prompts):
                return text[len(prompts) :]
        return text

    def _shorten(self) -> None:
        """Forget the oldest ids, at a place where the text of the rest is the end of the whole text."""
        if self._num_unfinished and len(self._window) < 8 * _MAX_WINDOW:
            return  # for now, since a cut could go through a character; but a run of invalid bytes may be endless
        self._shorten_at = len(self._window) + _MAX_WINDOW
        for cut in range(len(self._window) - _MAX_WINDOW, 0, -1):
            text = self._decode(self._window[cut:])
            num_lost = len(self._text) - len(text)
            if text and num_lost <= self._num_given and self._text.endswith(text):
                self._window = self._window[cut:]
                self._text = text
                self._num_given -= num_lost
                self._shorten_at = 2 * _MAX_WINDOW
                return
        without_middle = self._window[:_MAX_WINDOW] + self._window[-_MAX_WINDOW:]
        if len(without_middle) < len(self._window) and self._decode(without_middle) == self._text:
            # The ids between have no text.
            self._window = without_middle
            self._shorten_at = 3 * _MAX_WINDOW


def _decode_utf8(data: bytes) -> tuple[str, bytes]:
    """Decode ``data``; returns the text, and the bytes at its end that can still become a character."""
    text, num_decoded = utf_8_decode(data, "replace", False)
    rest = data[num_decoded:]
    if len(rest) == 2 and rest >= _SURROGATES and rest[0] == _SURROGATES[0]:
        return text + 2 * _REPLACEMENT, b""  # the codec waits for a third byte, which could not help
    return text, rest


class TextPipeline:
    """Turns the output ids of one request into its text, up to a stop.

    Ids are never held back; text may lag behind them, and ``flush`` gives the rest.

    Attributes:
        matched: the stop string or pattern that ended the text, else None.
    """

    __slots__ = ("_detokenizer", "_stops", "matched")

    def __init__(self, detokenizer: Detokenizer, stops: StopMatcher | None = None) -> None:
        self._detokenizer = detokenizer
        self._stops = stops if stops is not None and stops.has_stops else None
        self.matched: str | None = None

    @property
    def search(self) -> RegexSearch | None:
        """The search for stop patterns; None: the request has none."""
        return None if self._stops is None else self._stops.search

    def push(self, token_ids: Sequence[int]) -> tuple[str, int, str | None]:
        """Take the next ids.

        Returns the text that has become certain, how many of the ids belong to the output (all, or up to and with the
        one that completes a stop; none behind a stop), and the stop that was matched, else None.

        Raises:
            RequestError: a stop pattern took too long.
        """
        stops = self._stops
        if stops is None:
            return self._detokenizer.push(token_ids), len(token_ids), None
        if self.matched is not None:
            return "", 0, self.matched
        text = ""
        num_consumed = 0
        for token_id in token_ids:  # one by one, to know the one that completes the stop
            text += stops.push(self._detokenizer.push((token_id,)))
            num_consumed += 1
            if stops.matched is not None:
                self.matched = stops.matched
                break
        return text, num_consumed, self.matched

    def flush(self) -> str:
        """Return the rest of the text; no more ids will come. It may itself hold a stop: see ``matched``."""
        if self._stops is None:
            return self._detokenizer.flush()
        if self.matched is not None:
            return ""
        text = self._stops.push(self._detokenizer.flush())
        self.matched = self._stops.matched
        return text + self._stops.flush()
