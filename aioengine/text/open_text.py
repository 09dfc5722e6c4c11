"""The text of one request from its first token to its end."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from aioengine.protocol.messages import End, FinishCode, TextChunks, TextOpened, TextRules
from aioengine.text.detokenizer import NO_TEXT, TextPipeline

_UNSTREAMED_INTERVAL = 64
"""Ids per chunk of a request that does not stream. It is not one chunk at the end, because after a crash all ids that
were not delivered are computed again.
"""


class OpenText:
    """The text of a request between its first token and its end.

    Ids and text are collected into chunks of ``stream_interval`` ids; the first id is sent immediately. Without
    streaming, chunks have ``_UNSTREAMED_INTERVAL`` ids. The ids of a chunk are decoded together. With stops, each id is
    decoded separately, because it may complete a stop. The sent text is a function of the sent ids, so a request can
    continue after any chunk.

    Attributes:
        logprobs: the logprobs to which texts are added; None: no texts are added.
    """

    def __init__(self, opened: TextOpened) -> None:
        rules = opened.text
        self.uid = opened.first_token.uid
        self.num_preemptions = opened.num_preemptions
        self._opened = opened
        self.logprobs = rules.logprobs
        self._pipeline = NO_TEXT
        self._has_stops = bool(rules.stop or rules.stop_regex)
        self._sends_every_id = rules.stream and rules.stream_interval <= 1 and not self._has_stops
        self._interval = max(1, rules.stream_interval) if rules.stream else _UNSTREAMED_INTERVAL
        self._num_wanted = 1 if rules.stream else self._interval
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._num_decoded = 0  # number of collected ids that are decoded

    def prepare(self, make_pipeline: Callable[[TextRules], TextPipeline]) -> None:
        """Build the stages, and decode the ids that were emitted before. Raise an exception if the rules are invalid,
        or the exception of the decoder.
        """
        known_ids = self._opened.known_ids
        self._opened = replace(self._opened, known_ids=[])  # frees their memory
        self._pipeline = make_pipeline(self._opened.text)
        if self._opened.text.stop_regex:
            for token_id in known_ids:
                self._pipeline.push((token_id,))
        elif known_ids:
            self._pipeline.push(known_ids)

    @property
    def matched(self) -> str | None:
        """The stop that ended the text, or None."""
        return self._pipeline.matched

    def push(self, token_id: int, end: End | None, chunks: TextChunks) -> bool:
        """Add the next id. Return whether it completes a stop. end: the end of the request, if known.

        Raises the exception of the decoder.
        """
        if self._sends_every_id and end is None:  # no ids or text are collected
            chunks.texts.append(self._pipeline.push((token_id,)))
            chunks.tokens.add(self.uid, (token_id,))
            return False
        self._token_ids.append(token_id)
        is_trimmed = (
            end is not None
            and end.code == FinishCode.STOP
            and end.matched == token_id
            and not self._opened.text.no_stop_trim
        )
        if is_trimmed:
            self._decode(len(self._token_ids) - 1)
            self._num_decoded += 1  # keep the id without text
        elif self._has_stops:
            self._decode(len(self._token_ids))
            if self.matched is not None:
                self._emit(chunks)
                return True
        if len(self._token_ids) >= self._num_wanted and end is None:
            self._decode(len(self._token_ids))
            self._emit(chunks)
            self._num_wanted = self._interval
        return False

    def finish(self, chunks: TextChunks) -> str | None:
        """Emit the remaining ids and text. Return the stop if the last text completes one."""
        self._decode(len(self._token_ids))
        self._texts.append(self._pipeline.flush())
        if self._token_ids or any(self._texts):
            self._emit(chunks)
        return self.matched

    def complete(self, end: End, now: float) -> End:
        """Return ``end`` with the values for ``meta_info``."""
        return end.complete(self._opened.first_token, self.num_preemptions, now)

    def _decode(self, end: int) -> None:
        """Decode the waiting ids up to ``end``."""
        token_ids = self._token_ids[self._num_decoded : end]
        self._num_decoded = end
        if token_ids:
            self._texts.append(self._pipeline.push(token_ids))

    def _emit(self, chunks: TextChunks) -> None:
        chunks.tokens.add(self.uid, self._token_ids)
        chunks.texts.append("".join(self._texts))
        self._texts.clear()
        self._token_ids.clear()
        self._num_decoded = 0
