"""Answers with choices: whole, and as streams that a client may continue after a disconnect."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, cast

from starlette.responses import Response

from aioengine.api.stream import Stream
from aioengine.openai.bodies import GenerateBody
from aioengine.openai.http_call import HttpCall, Info, StreamPosition, event, usage
from aioengine.openai.replies import DONE, CallError, Errors, EventStream, check_completed, json_response, openai_error

Write = Callable[["Piece"], dict[str, Any] | None]
"""Returns the choice of a piece; None: it needs none."""

_LENGTHS: Final = ("max_tokens", "max_new_tokens", "max_completion_tokens")


class Piece(NamedTuple):
    """New output of one answer, or all of it.

    Attributes:
        text: the text that the client does not have. seen: the text before it in ``info``.
        num_seen: tokens in the lists of ``info`` that the client has.
        is_first: the client has no output.
    """

    info: Info
    text: str
    seen: str = ""
    num_seen: int = 0
    is_first: bool = True


class Choices(NamedTuple):
    """How an endpoint answers with choices.

    Attributes:
        prefix: of ids. kind, chunk_kind: names of the objects.
        start: makes the call; ``stream=True``: as a stream.
        new_row: returns the writer of an answer, from the id of the request and the index of the answer.
    """

    prefix: str
    kind: str
    chunk_kind: str
    name: str
    sampling: Mapping[str, object]
    start: Callable[..., Any]
    new_row: Callable[[str, int], Write]

    async def answer(self, call: HttpCall, body: GenerateBody) -> Response:
        """Make the call, and return its response."""
        if body.stream:
            stream, position = await call.stream(partial(self.start, stream=True), self.prefix)
            return EventStream(stream, self._events(stream, position, body), _failed)
        generation = self.start()
        answers = await call.answers(generation)
        infos = [answer["meta_info"] for answer in answers]
        choices = [
            self.new_row(generation.rid, index)(Piece(answer["meta_info"], answer["text"]))
            for index, answer in enumerate(answers)
        ]
        return json_response(self._head(generation.rid, self.kind) | {"choices": choices, "usage": self._usage(infos)})

    def _head(self, rid: str, kind: str) -> dict[str, object]:
        """Return the common keys of a response or of its chunks."""
        return {"id": f"{self.prefix}-{rid}", "object": kind, "created": int(time.time()), "model": self.name}

    def _usage(self, infos: Sequence[Info]) -> dict[str, object]:
        return usage(infos, cast("int", self.sampling.get("n") or 1))

    async def _events(self, stream: Stream, position: StreamPosition, body: GenerateBody) -> AsyncGenerator[bytes]:
        """Yield the events of a stream, from ``position`` on."""
        head = self._head(position.rid, self.chunk_kind)
        rows: dict[int, Write] = {}
        infos: dict[int, Info] = {}
        is_new = not position.num_characters and not position.num_tokens
        async for chunk in stream:
            index, info = chunk.get("index", 0), chunk["meta_info"]
            is_first = index not in rows and not chunk["text_offset"] and is_new
            if index not in rows:
                rows[index] = self.new_row(position.rid, index)
            if (reason := info["finish_reason"]) is not None:
                check_completed(reason)
            infos[index] = info
            seen, text, num_seen = position.split(chunk)
            choice = rows[index](Piece(info, text, seen, num_seen, is_first))
            has_news = text or num_seen < len(chunk["output_ids"]) or reason is not None
            if choice is None or not has_news:
                continue
            value = head | {"choices": [choice]}
            if body.stream_options.continuous_usage_stats:
                value["usage"] = usage([info])
            yield event(value, None if body.resume_ttl is None else position.after(chunk))
        if not infos or any(info["finish_reason"] is None for info in infos.values()):
            raise CallError("another request continues this stream, so it ends here", 409)
        if body.stream_options.include_usage:
            yield event(head | {"choices": [], "usage": self._usage([infos[index] for index in sorted(infos)])})
        yield DONE


def _failed(error: Errors) -> bytes:
    return event(openai_error(error)[1]) + DONE


def limit_length(sampling: dict[str, object], default: int | None) -> None:
    """Set the maximum length of answers, if the client has not set it. None: the context length."""
    if sampling.keys().isdisjoint(_LENGTHS):
        sampling["max_new_tokens"] = default
