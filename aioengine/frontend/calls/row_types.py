"""The kinds of rows: rows that keep their output for a session or for later readers, and rows of vectors."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import ClassVar, cast

from msgspec import Struct

from aioengine.api import answers
from aioengine.api.answers import Answer, Chunk, Embedding, Ranking, RowError
from aioengine.errors import RequestError
from aioengine.frontend.calls.call import CallRow, drop_old_hidden_states
from aioengine.frontend.intake.pooling import Pooled
from aioengine.frontend.intake.requests import CallRequest
from aioengine.protocol.columns import DRAFTS, POOLED_VECTOR, WEIGHT_VERSION, Extra
from aioengine.protocol.messages import LAST_STATES, End

MIN_LENGTH = 1e-12
"""Normalization divides by the length of a vector, but at least by this."""


def row_type(request: CallRequest) -> type[CallRow]:
    """Return the class of the rows of a call."""
    if request.resume_ttl_s is not None:
        return LoggedRow
    if request.pooled is not None:
        return PooledRow
    return CallRow if request.sessions is None else SessionRow


@dataclass(eq=False)
class SessionRow(CallRow):
    """A row of a session. ``kept_ids``: all its output ids so far."""

    kept_ids: list[int] = field(default_factory=list[int])

    def put(self, text: str, new: int | list[int]) -> bool:
        self.kept_ids += [new] if isinstance(new, int) else new
        return super().put(text, new)


class PooledRow(CallRow):
    """A row of a call that returns vectors or scores."""

    def failure(self, end: End) -> RowError | None:
        """Return the error that this end means. A row without a vector has failed."""
        error = answers.error(end)
        if error is None and self._vector_data() is None:
            reason = dict(answers.finish_reason(end, 0))
            error = RequestError("schedule", f"it ended before its vector was computed: {reason}")
        return error

    def answer(self) -> Answer:
        import numpy as np  # most programs generate and need no numpy

        pooled = cast("Pooled", self.call.request.pooled)
        vector = np.frombuffer(self._vector_data() or b"", np.float32)[: pooled.dimensions].copy()
        if pooled.is_normalized:
            vector /= max(math.sqrt(float(vector @ vector)), MIN_LENGTH)
        info = super().answer()["meta_info"]
        answer: Embedding | Ranking = {"embedding": vector, "meta_info": info}
        if pooled.gives_scores:
            score = float(vector[0])
            if pooled.has_sigmoid:
                small = math.exp(-abs(score))  # cannot overflow
                score = (1.0 if score >= 0 else small) / (1.0 + small)
            answer = {"score": score, "index": self.index, "meta_info": info}
        return cast("Answer", answer)

    def _vector_data(self) -> bytes | None:
        return next((extra.data for (_, kind), extra in self.extras.items() if kind == POOLED_VECTOR), None)


class Log(Struct):
    """All text, ids and extras of one row, in the pieces in which they came."""

    token_ids: list[int] = []
    extras: dict[tuple[int, str], Extra] = {}
    _texts: list[str] = []
    _text_ends: list[int] = []
    _token_ends: list[int] = []

    @property
    def num_characters(self) -> int:
        return self._text_ends[-1] if self._text_ends else 0

    def add(self, text: str, token_ids: list[int]) -> None:
        if text or token_ids:
            self._text_ends.append(self.num_characters + len(text))
            self._texts.append(text)
            self.token_ids += token_ids
            self._token_ends.append(len(self.token_ids))

    def text_since(self, offset: int) -> str:
        first = self._piece_of(offset)
        text_start = self._text_ends[first - 1] if first else 0
        return "".join(self._texts[first:])[offset - text_start :]

    def token_index(self, offset: int) -> int:
        """Return the index of the first id of the text from ``offset`` on. Ids without text may be repeated.

        Raises:
            ValueError: the text is shorter.
        """
        if offset > self.num_characters:
            raise ValueError(f"from_offset must be at most {self.num_characters}, the text so far, got {offset}")
        first = self._piece_of(offset)
        return self._token_ends[first - 1] if first else 0

    def _piece_of(self, offset: int) -> int:
        """Return the first piece that ends after ``offset``. A piece without text belongs to the text after it."""
        first = bisect_left(self._text_ends, offset)
        if first < len(self._texts) and self._texts[first] and self._text_ends[first] == offset:
            first += 1
        return first


@dataclass(eq=False)
class LoggedRow(CallRow):
    """The row of an attachable call. It writes its output to a log, which readers read one after the other."""

    log: Log = field(default_factory=Log)

    keeps_output: ClassVar[bool] = True

    @property
    def kept_ids(self) -> list[int]:
        """All its output ids so far."""
        return self.log.token_ids

    @property
    def num_kept_tokens(self) -> int:
        """The memory of its output, and of the prompt if readers get it. A logprob counts as one token."""
        num_entries = sum(decoder.num_entries for decoder in self.decoders)
        return len(self.log.token_ids) + len(self.prompt_token_ids) + num_entries

    def put(self, text: str, new: int | list[int]) -> bool:
        self.log.add(text, [new] if isinstance(new, int) else new)
        if self.has_unread or not self.call.has_reader:
            return False
        self.has_unread = True
        self.call.ready.append(self)
        return True

    def put_extra(self, extra: Extra) -> None:
        super().put_extra(extra)
        if extra.kind not in (DRAFTS, WEIGHT_VERSION) and not any(
            extra.kind in decoder.kinds for decoder in self.decoders
        ):
            self.log.extras[extra.index, extra.kind] = extra
            if self.hidden_states == LAST_STATES:
                drop_old_hidden_states(self.log.extras, self.num_output)

    @property
    def num_output(self) -> int:
        return len(self.log.token_ids)

    def rewind(self, offset: int) -> None:
        """Let a new reader start at character ``offset`` of the text. ``Call.ready`` is its queue."""
        self.text_offset, self.token_offset = offset, self.log.token_index(offset)
        self.extras.clear()
        for extra in self.log.extras.values():
            super().put_extra(extra)
        is_ended = self.final_info is not None and self.error is None
        self.has_unread = is_ended or offset < self.log.num_characters or self.token_offset < self.num_output
        if self.has_unread:
            self.call.ready.append(self)

    def take(self) -> Chunk:
        self.text, self.token_ids = self.log.text_since(self.text_offset), self.log.token_ids[self.token_offset :]
        return super().take()


KeptRow = SessionRow | LoggedRow
"""A row that keeps its output ids."""
