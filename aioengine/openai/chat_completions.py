"""/v1/chat/completions: answer conversations."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, cast

from aioengine.errors import EngineError
from aioengine.openai import token_logprobs
from aioengine.openai.bodies import GenerateBody, add_constraint, read_generate_fields
from aioengine.openai.chat_calls import ChatCall, PartReader, tool_call_id
from aioengine.openai.conversations import template_messages
from aioengine.openai.http_call import event, finish_word, usage
from aioengine.openai.replies import DONE, check_completed, event_stream, json_response, openai_error
from aioengine.parsing import Content, Reasoning

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.responses import Response

    from aioengine.api.answers import FinishReason
    from aioengine.api.stream import Stream
    from aioengine.openai.chat_calls import Part
    from aioengine.openai.http_call import Call, Info, Place
    from aioengine.openai.served_model import ServedModel
    from aioengine.parsing import OutputParser

LENGTHS: Final = ("max_tokens", "max_new_tokens", "max_completion_tokens")


class ChatBody(GenerateBody, kw_only=True):
    """The fields of /v1/chat/completions.

    Attributes:
        chat_template: the name of one of the model's templates.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int = 0
    modalities: tuple[str, ...] = ("text",)
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


_VARIABLES: Final = ("reasoning_effort", "enable_thinking", "add_generation_prompt", "continue_final_message")


async def chat_completions(call: Call) -> Response:
    """Answer a request to /v1/chat/completions."""
    body, sampling = read_generate_fields(call.body, ChatBody)
    if body.modalities != ("text",):
        raise ValueError(f"modalities is {list(body.modalities)}; answers are text")
    add_constraint(sampling, body.response_format, body.structured_outputs)
    if not sampling.keys() & set(LENGTHS):
        sampling["max_new_tokens"] = None
    name, adapter = await call.model.find(body.model)
    variables = {name: value for name in _VARIABLES if (value := getattr(body, name)) is not None}
    chat = ChatCall(
        messages=template_messages(body.messages),
        sampling=sampling,
        options=call.options(
            adapter,
            timeout=body.timeout,
            resume_ttl=body.resume_ttl,
            **(token_logprobs.options(body.top_logprobs) if body.logprobs else {}),
        ),
        template=body.chat_template,
        variables=variables | (body.chat_template_kwargs or {}),
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
    )
    chat.prepare(call.model)
    num_samples = cast("int", sampling.get("n") or 1)
    if body.stream:
        stream, place = await call.stream(lambda: chat.stream(call.model))
        head = _head(place.rid, name, "chat.completion.chunk")
        return event_stream(_events(stream, place, head, body, chat, call.model, num_samples))
    generation = chat.generation(call.model)
    choices: list[dict[str, object]] = []
    answers = await call.answers(generation)
    for index, answer in enumerate(answers):
        info, row = answer["meta_info"], _Row(call.model, generation.rid, index, chat.parser(call.model))
        delta = row.delta(answer["text"], is_last=True)
        message = {"role": "assistant", "content": None if row.parts.has_calls else "", "refusal": None, **delta}
        for tool_call in message.get("tool_calls", ()):
            del tool_call["index"]
        choices.append(
            {
                "index": index,
                "message": message,
                "finish_reason": row.finish_word(info["finish_reason"]),
                "logprobs": token_logprobs.chat_logprobs(info) if body.logprobs else None,
            }
        )
    infos = [answer["meta_info"] for answer in answers]
    head = _head(generation.rid, name, "chat.completion")
    return json_response(head | {"choices": choices, "usage": usage(infos, num_samples)})


def _head(rid: str, model: str, kind: str) -> dict[str, Any]:
    """Return the common keys of a response or of its chunks."""
    return {"id": f"chatcmpl-{rid}", "object": kind, "created": int(time.time()), "model": model}


class _Row:
    """One answer, and its parts so far."""

    def __init__(self, model: ServedModel, rid: str, index: int, parser: OutputParser) -> None:
        self.parts = PartReader()
        self.info: Info | None = None
        self._model = model
        self._rid = rid
        self._index = index
        self._parser = parser

    def delta(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Add text, and return the new content, reasoning and tool calls."""
        events = self._parser.push(text)
        if is_last:
            events += self._parser.flush()
        delta: dict[str, Any] = {}
        for part, piece in self.parts.read(events):
            if part.kind in (Content, Reasoning):
                key = "content" if part.kind is Content else "reasoning_content"
                delta[key] = delta.get(key, "") + piece
            else:
                self._add_call(delta.setdefault("tool_calls", []), part, piece)
        return delta

    def _add_call(self, calls: list[dict[str, Any]], part: Part, piece: str) -> None:
        if not piece:  # it begins
            call_id = tool_call_id(self._model, self._rid, self._index, part.call)
            function = {"name": part.name, "arguments": ""}
            calls.append({"index": part.call, "id": call_id, "type": "function", "function": function})
        elif not calls:
            calls.append({"index": part.call, "function": {"arguments": piece}})
        else:
            calls[-1]["function"]["arguments"] += piece

    def finish_word(self, reason: FinishReason) -> str:
        return "tool_calls" if reason == "stop" and self.parts.has_calls else finish_word(reason)


async def _events(
    stream: Stream,
    place: Place,
    head: dict[str, Any],
    body: ChatBody,
    chat: ChatCall,
    model: ServedModel,
    num_samples: int,
) -> AsyncIterator[bytes]:
    """Yield the events of a stream, from ``place`` on. ``head``: the common keys of its chunks."""
    rows: dict[int, _Row] = {}
    async with stream:  # a disconnect closes this generator, which aborts or detaches the request
        try:
            async for chunk in stream:
                index, info = chunk.get("index", 0), chunk["meta_info"]
                row = rows.get(index)
                delta: dict[str, Any] = {}
                if row is None:
                    row = rows[index] = _Row(model, place.rid, index, chat.parser(model))
                    delta = {} if place.num_characters else {"role": "assistant", "content": ""}
                seen, text, num_seen = place.split(chunk)
                if seen:
                    row.delta(seen, is_last=False)
                reason = info["finish_reason"]
                if reason is not None:
                    check_completed(reason)
                row.info = info
                delta |= row.delta(text, is_last=reason is not None)
                if not delta and reason is None and not body.logprobs:
                    continue  # a tag may begin here
                choice = {
                    "index": index,
                    "delta": delta,
                    "finish_reason": None if reason is None else row.finish_word(reason),
                    "logprobs": token_logprobs.chat_logprobs(info, num_seen) if body.logprobs else None,
                }
                value = head | {"choices": [choice]}
                if body.stream_options.continuous_usage_stats:
                    value["usage"] = usage([info])
                yield event(value, None if body.resume_ttl is None else place.after(chunk))
            if body.stream_options.include_usage:
                infos = [info for _, row in sorted(rows.items()) if (info := row.info) is not None]
                yield event(head | {"choices": [], "usage": usage(infos, num_samples)})
        except (EngineError, ValueError, TypeError) as error:  # the status was sent before the first chunk
            yield event(openai_error(error)[1])
        yield DONE
