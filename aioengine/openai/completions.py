"""/v1/completions: continue prompts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from starlette.responses import Response

from aioengine.api.engine import AsyncEngine
from aioengine.openai import token_logprobs
from aioengine.openai.bodies import GenerateBody, add_constraint, prompt_arguments, read_generate_fields
from aioengine.openai.choices import Choices, Piece, limit_length
from aioengine.openai.http_call import CallError, HttpCall, finish_word
from aioengine.openai.token_logprobs import TextOffsets

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's default for this endpoint."""


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


async def completions(call: HttpCall) -> Response:
    """Answer a request to /v1/completions."""
    body, sampling = read_generate_fields(call.body, CompletionBody)
    add_constraint(sampling, body.response_format, body.structured_outputs)
    limit_length(sampling, DEFAULT_MAX_TOKENS)
    if body.echo and body.truncate_prompt_tokens is not None:
        raise CallError("echo does not work with truncate_prompt_tokens; leave out one of them")
    engine = call.model.engine
    name, adapter = await call.model.find(body.model)
    prompt: Any = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]  # a list with one prompt is one prompt
    arguments = {
        **prompt_arguments(prompt),
        **call.options(
            adapter,
            timeout=body.timeout,
            resume_ttl=body.resume_ttl,
            add_special_tokens=body.add_special_tokens,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
        ),
        "sampling_params": sampling,
    }
    if body.logprobs is not None:
        arguments |= token_logprobs.options(body.logprobs)
        arguments["logprob_start_len"] = 0 if body.echo else -1
    num_samples: Any = sampling.get("n") or 1

    def new_row(_: str, index: int) -> Callable[[Piece], dict[str, Any]]:
        echo = _echo(prompt, index // num_samples, engine) if body.echo else ""
        return partial(write, index, echo, TextOffsets(engine, len(echo)))

    def write(index: int, echo: str, offsets: TextOffsets, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + piece.text if piece.is_first else piece.text,
            "finish_reason": finish_word(piece.info["finish_reason"]),
            "logprobs": None,
        }
        if body.logprobs is not None:
            choice["logprobs"] = token_logprobs.completion_logprobs(
                piece.info,
                offsets,
                start=piece.num_seen,
                prompt_offsets=TextOffsets(engine, 0) if body.echo and piece.is_first else None,
            )
        return choice

    return await Choices(
        prefix="cmpl",
        kind="text_completion",
        chunk_kind="text_completion",
        name=name,
        sampling=sampling,
        start=partial(engine.async_generate, **arguments),
        new_row=new_row,
    ).answer(call, body)


def _echo(prompt: str | list[Any], index: int, engine: AsyncEngine) -> str:
    """Return the text of a prompt. The engine has accepted all of them."""
    entry: Any = prompt if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt[index]
    return entry if isinstance(entry, str) else engine.tokenizer.decode(entry, skip_special_tokens=False)
