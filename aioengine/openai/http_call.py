"""One HTTP request: its answers, its stream, and the position where a broken stream continues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from starlette.requests import Request

from aioengine.api.answers import Answer, Chunk, ChunkInfo, FinishReason, MetaInfo
from aioengine.api.stream import Generation, Stream
from aioengine.http import until_disconnect
from aioengine.openai.replies import CallError, check_completed, encode
from aioengine.openai.served_model import ServedModel

Info = ChunkInfo | MetaInfo


TRACE_HEADERS: Final = ("traceparent", "tracestate", "baggage")
"""The headers that ``aioengine.tracing`` may read. Observers of the engine get no other header, and so no API key."""


class HttpCall(NamedTuple):
    """A request with its body, and the model that answers it."""

    model: ServedModel
    request: Request
    body: dict[str, Any]

    def options(self, adapter: str | None, **options: object) -> dict[str, Any]:
        """Return the keyword arguments of a call of the engine: its adapter, the client's trace, and ``options``."""
        trace = {name: value for name in TRACE_HEADERS if (value := self.request.headers.get(name))}
        given = {"lora_path": adapter, "external_trace_header": trace or None, **options}
        return {name: value for name, value in given.items() if value is not None}

    async def rows(self, generation: Generation[Any]) -> list[Any]:
        """Return the results of a call, one for each input. Its request is aborted if the client disconnects."""
        result = await until_disconnect(self.request, generation)
        return result if isinstance(result, list) else [result]

    async def answers(self, generation: Generation[Any]) -> list[Answer]:
        """Return the answers of a call, as ``rows``. Raises EngineError if one was ended before it was complete."""
        rows: list[Answer] = await self.rows(generation)
        for row in rows:
            check_completed(row["meta_info"]["finish_reason"])
        return rows

    async def stream(self, open_stream: Callable[[], Stream], prefix: str) -> tuple[Stream, StreamPosition]:
        """Return a new stream once it is accepted, or continue the one of the ``Last-Event-ID`` header.

        The text until the returned position is known to the client. prefix: of the ids of the endpoint, because only
        the endpoint that began a stream can continue it.

        Raises:
            CallError: the header is wrong, or its position is beyond the end of the stream.
        """
        last_event = self.request.headers.get("last-event-id")
        if last_event is None:
            stream = await open_stream()
            return stream, StreamPosition(prefix, stream.rid)
        position, attach = StreamPosition.read(last_event, prefix), self.model.engine.attach
        try:
            await attach(position.rid, position.num_characters)  # a check; parsers need the text from the beginning
        except ValueError as error:
            raise CallError(f"the stream of Last-Event-ID cannot be continued: {error}") from None
        return await attach(position.rid), position


class StreamPosition(NamedTuple):
    """A position in the stream of a request: the numbers of characters and tokens before it. As text: an event id."""

    prefix: str
    rid: str
    num_characters: int = 0
    num_tokens: int = 0

    @classmethod
    def read(cls, text: str, prefix: str) -> StreamPosition:
        """Read the id of an event. Raises CallError.

        The number of tokens is not checked, because tokens without text cannot be told from it. If a client makes up a
        larger one, it gets all further text, but no logprobs of these tokens.
        """
        start, *numbers = text[:200].rsplit(":", 2)
        found, _, rid = start.partition("-")
        is_id = len(numbers) == 2 and all(number.isascii() and number.isdigit() for number in numbers)
        if found != prefix or not is_id:
            raise CallError(f"Last-Event-ID is {text[:100]!r}; it must be the id of an event of this endpoint")
        return cls(prefix, rid, *map(int, numbers))

    def __str__(self) -> str:
        return f"{self.prefix}-{self.rid}:{self.num_characters}:{self.num_tokens}"

    def split(self, chunk: Chunk) -> tuple[str, str, int]:
        """Return the text of a chunk before and after this position, and the number of its tokens before it."""
        text = chunk["text"]
        if not self.num_characters and not self.num_tokens:  # the stream is new, as nearly always
            return "", text, 0
        start = min(max(self.num_characters - chunk["text_offset"], 0), len(text))
        return text[:start], text[start:], max(self.num_tokens - chunk["token_offset"], 0)

    def after(self, chunk: Chunk) -> StreamPosition:
        """Return the position at the end of a chunk."""
        num_characters = chunk["text_offset"] + len(chunk["text"])
        return StreamPosition(self.prefix, self.rid, num_characters, chunk["token_offset"] + len(chunk["output_ids"]))


def event(value: object, position: StreamPosition | None = None, name: str = "") -> bytes:
    """Return a server-sent event. ``position``: its id; ``name``: its type."""
    data = b"data: %b\n\n" % encode(value)
    if position is not None:
        data = b"id: %b\n%b" % (str(position).encode(), data)
    return b"event: %b\n%b" % (name.encode(), data) if name else data


def usage(infos: Sequence[Info], num_samples: int = 1) -> dict[str, object]:
    """Return the usage of answers. Each ``num_samples`` answers share a prompt."""
    prompts = infos[::num_samples]
    num_prompt = sum(info["prompt_tokens"] for info in prompts)
    num_output = sum(info["completion_tokens"] for info in infos)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(info["cached_tokens"] for info in prompts)},
    }


def finish_word(reason: FinishReason | None) -> str | None:
    """Return OpenAI's word for the end of a complete answer. A deadline of the client limits the length, too."""
    return None if reason is None else "stop" if reason == "stop" else "length"
