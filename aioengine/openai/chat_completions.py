"""/v1/chat/completions: answer conversations."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

from aioengine.errors import EngineError
from aioengine.openai import token_logprobs
from aioengine.openai.bodies import GenerateBody, add_constraint, read_generate_fields
from aioengine.openai.conversations import template_messages
from aioengine.openai.http_call import call_options, event, finish_word, usage
from aioengine.openai.replies import DONE, check_completed, event_stream, json_response, openai_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.responses import Response

    from aioengine.api.stream import Stream
    from aioengine.openai.http_call import Call, Info, Place

LENGTHS = ("max_tokens", "max_new_tokens", "max_completion_tokens")


class ChatBody(GenerateBody, kw_only=True):
    """The fields of /v1/chat/completions.

    Attributes:
        chat_template: the name of one of the model's templates.
    """

    messages: list[dict[str, Any]]
    logprobs: bool = False
    top_logprobs: int = 0
    modalities: tuple[str, ...] = ("text",)
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


def template_options(body: ChatBody) -> dict[str, Any]:
    """Return the keyword arguments of ``async_chat`` for its template."""
    names = ("reasoning_effort", "add_generation_prompt", "continue_final_message")
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    options = {"chat_template": body.chat_template, "enable_thinking": body.enable_thinking}
    return options | {"chat_template_kwargs": given | (body.chat_template_kwargs or {})}


async def chat_completions(call: Call) -> Response:
    """Answer a request to /v1/chat/completions."""
    body, sampling = read_generate_fields(call.body, ChatBody)
    if body.modalities != ("text",):
        raise ValueError(f"modalities is {body.modalities}; answers are text")
    add_constraint(sampling, body.response_format, body.structured_outputs)
    if not sampling.keys() & set(LENGTHS):
        sampling["max_new_tokens"] = None
    name, adapter = await call.model.find(body.model)
    arguments = {
        "messages": template_messages(body.messages),
        "sampling_params": sampling,
        **template_options(body),
        **call_options(body, adapter),
        **(token_logprobs.options(body.top_logprobs) if body.logprobs else {}),
    }
    num_samples = cast("int", sampling.get("n") or 1)
    engine = call.model.engine
    if body.stream:
        stream, place = await call.stream(lambda: engine.async_chat(**arguments, stream=True))
        return event_stream(_events(stream, place, head(place.rid, name, "chat.completion.chunk"), body, num_samples))
    generation = engine.async_chat(**arguments)
    choices: list[dict[str, object]] = []
    answers = await call.answers(generation)
    for index, answer in enumerate(answers):
        info = answer["meta_info"]
        choices.append(
            {
                "index": index,
                "message": {"role": "assistant", "content": answer["text"], "refusal": None},
                "finish_reason": finish_word(info["finish_reason"]),
                "logprobs": token_logprobs.chat_logprobs(info) if body.logprobs else None,
            }
        )
    infos = [answer["meta_info"] for answer in answers]
    value = head(generation.rid, name, "chat.completion")
    return json_response(value | {"choices": choices, "usage": usage(infos, num_samples)})


def head(rid: str, model: str, kind: str) -> dict[str, object]:
    """Return the common keys of a response or of its chunks."""
    return {"id": f"chatcmpl-{rid}", "object": kind, "created": int(time.time()), "model": model}


async def _events(
    stream: Stream, place: Place, head: dict[str, object], body: ChatBody, num_samples: int
) -> AsyncIterator[bytes]:
    """Yield the events of a stream, from ``place`` on. ``head``: the common keys of its chunks."""
    infos: dict[int, Info] = {}
    async with stream:  # a disconnect closes this generator, which aborts or detaches the request
        try:
            async for chunk in stream:
                index, info = chunk.get("index", 0), chunk["meta_info"]
                _, text, num_seen = place.split(chunk)
                delta: dict[str, object] = {"content": text} if text else {}
                if index not in infos and not place.num_characters:
                    delta = {"role": "assistant", "content": text}
                infos[index] = info
                reason = info["finish_reason"]
                if reason is not None:
                    check_completed(reason)
                choice = {
                    "index": index,
                    "delta": delta,
                    "finish_reason": None if reason is None else finish_word(reason),
                    "logprobs": token_logprobs.chat_logprobs(info, num_seen) if body.logprobs else None,
                }
                value = head | {"choices": [choice]}
                if body.stream_options.continuous_usage_stats:
                    value["usage"] = usage([info])
                yield event(value, None if body.resume_ttl is None else place.after(chunk))
            if body.stream_options.include_usage:
                rows = [infos[index] for index in sorted(infos)]
                yield event(head | {"choices": [], "usage": usage(rows, num_samples)})
        except (EngineError, ValueError) as error:  # the status was sent before the first chunk
            yield event(openai_error(error)[1])
        yield DONE
