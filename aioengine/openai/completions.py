"""/v1/completions: continue prompts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, cast

from aioengine.errors import EngineError
from aioengine.openai import token_logprobs
from aioengine.openai.bodies import GenerateBody, add_constraint, read_generate_fields
from aioengine.openai.http_call import event, finish_word, usage
from aioengine.openai.replies import DONE, check_completed, event_stream, json_response, openai_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from starlette.responses import Response

    from aioengine.api.stream import Stream
    from aioengine.openai.http_call import Call, Info, Place

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's default for this endpoint."""

_LENGTHS: Final = ("max_tokens", "max_new_tokens", "max_completion_tokens")


class CompletionBody(GenerateBody, kw_only=True):
    """The fields of /v1/completions.

    Attributes:
        prompt: a text or token ids, or a list of either.
        echo: the text begins with the prompt. logprobs: number of most likely tokens at each position.
    """

    prompt: str | list[str | int | list[int]]
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None


async def completions(call: Call) -> Response:
    """Answer a request to /v1/completions."""
    body, sampling = read_generate_fields(call.body, CompletionBody)
    add_constraint(sampling, body.response_format, body.structured_outputs)
    if not sampling.keys() & set(_LENGTHS):
        sampling["max_tokens"] = DEFAULT_MAX_TOKENS
    name, adapter = await call.model.find(body.model)
    arguments = {
        **_prompts(body.prompt),
        **call.options(adapter, timeout=body.timeout, resume_ttl=body.resume_ttl),
        "sampling_params": sampling,
        "add_special_tokens": body.add_special_tokens,
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
    }
    if body.logprobs is not None:
        arguments |= token_logprobs.options(body.logprobs)
        arguments["logprob_start_len"] = 0 if body.echo else -1
    echoes = _texts(body.prompt, call) if body.echo else []
    num_samples = cast("int", sampling.get("n") or 1)
    engine = call.model.engine
    if body.stream:
        stream, place = await call.stream(lambda: engine.async_generate(**arguments, stream=True))
        return event_stream(_events(stream, place, _head(place.rid, name), body, echoes, num_samples))
    generation = engine.async_generate(**arguments)
    choices: list[dict[str, object]] = []
    answers = await call.answers(generation)
    for index, answer in enumerate(answers):
        echo = echoes[index // num_samples] if echoes else ""
        info = answer["meta_info"]
        choices.append(
            {
                "index": index,
                "text": echo + answer["text"],
                "finish_reason": finish_word(info["finish_reason"]),
                "logprobs": _logprobs(body, info, 0, 0, is_first=True),
            }
        )
    infos = [answer["meta_info"] for answer in answers]
    return json_response(_head(generation.rid, name) | {"choices": choices, "usage": usage(infos, num_samples)})


def _prompts(prompt: str | list[Any]) -> dict[str, Any]:
    """Return the arguments of ``async_generate`` for a prompt. A list with one prompt is one prompt."""
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = cast("str | list[Any]", prompt[0])
    return {"prompt" if _is_text(prompt) else "input_ids": prompt}


def _is_text(prompt: str | list[Any]) -> bool:
    return isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], str))


def _texts(prompt: str | list[Any], call: Call) -> list[str]:
    """Return the texts of the prompts."""
    if isinstance(prompt, str):
        return [prompt]
    prompts: list[Any] = [prompt] if prompt and isinstance(prompt[0], int) else prompt
    decode = call.model.engine.tokenizer.decode
    return [entry if isinstance(entry, str) else decode(entry, skip_special_tokens=False) for entry in prompts]


def _head(rid: str, model: str) -> dict[str, object]:
    return {"id": f"cmpl-{rid}", "object": "text_completion", "created": int(time.time()), "model": model}


def _logprobs(
    body: CompletionBody, info: Info, text_offset: int, start: int, *, is_first: bool
) -> Mapping[str, object] | None:
    if body.logprobs is None:
        return None
    with_prompt = body.echo and is_first
    return token_logprobs.completion_logprobs(info, text_offset, start=start, with_prompt=with_prompt)


async def _events(
    stream: Stream,
    place: Place,
    head: dict[str, object],
    body: CompletionBody,
    echoes: Sequence[str],
    num_samples: int,
) -> AsyncIterator[bytes]:
    """Yield the events of a stream, from ``place`` on. ``head``: the common keys of its chunks."""
    infos: dict[int, Info] = {}
    options = body.stream_options
    async with stream:  # a disconnect closes this generator, which aborts or detaches the request
        try:
            async for chunk in stream:
                index, info = chunk.get("index", 0), chunk["meta_info"]
                is_first = index not in infos and not chunk["text_offset"] and not place.num_characters
                infos[index] = info
                _, text, num_seen = place.split(chunk)
                echo = echoes[index // num_samples] if echoes else ""
                offset = 0 if is_first else len(echo) + chunk["text_offset"] + len(chunk["text"]) - len(text)
                reason = info["finish_reason"]
                if reason is not None:
                    check_completed(reason)
                choice = {
                    "index": index,
                    "text": echo + text if is_first else text,
                    "finish_reason": None if reason is None else finish_word(reason),
                    "logprobs": _logprobs(body, info, offset, num_seen, is_first=is_first),
                }
                value = head | {"choices": [choice]}
                if options.continuous_usage_stats:
                    value["usage"] = usage([info])
                yield event(value, None if body.resume_ttl is None else place.after(chunk))
            if options.include_usage:
                rows = [infos[index] for index in sorted(infos)]
                yield event(head | {"choices": [], "usage": usage(rows, num_samples)})
        except (EngineError, ValueError, TypeError) as error:  # the status was sent before the first chunk
            yield event(openai_error(error)[1])
        yield DONE
