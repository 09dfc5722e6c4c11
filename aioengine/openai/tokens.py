"""/tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Sized
from typing import Any, Final

from starlette.responses import Response

from aioengine.openai.bodies import Body, read_fields
from aioengine.openai.conversations import template_messages
from aioengine.openai.http_call import HttpCall
from aioengine.openai.replies import CallError, json_response

CHARACTERS_PER_TOKEN: Final = 16
"""The limit for a text, per token of the context length."""


class TokenizeBody(Body, kw_only=True):
    """The fields of /tokenize: a text, or a conversation."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body, kw_only=True):
    """The fields of /detokenize."""

    tokens: list[int]
    skip_special_tokens: bool = False


async def tokenize(call: HttpCall) -> Response:
    """Answer a request to /tokenize: the token ids."""
    body = read_fields(call.body, TokenizeBody)
    await call.model.find(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise CallError("give either prompt or messages")
    tokenizer = call.model.engine.tokenizer
    length = (await call.model.engine.get_model_info())["context_length"]

    def ids() -> list[int]:
        text = body.prompt
        if text is None:
            text = tokenizer.apply_chat_template(
                template_messages(body.messages or []),
                tools=body.tools,
                add_generation_prompt=body.add_generation_prompt,
                chat_template_kwargs=body.chat_template_kwargs,
            )
        _check_length("the text", text, "characters", length * CHARACTERS_PER_TOKEN)
        return tokenizer.encode(text, add_special_tokens=body.add_special_tokens)

    tokens = await asyncio.to_thread(ids)
    return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": length})


async def detokenize(call: HttpCall) -> Response:
    """Answer a request to /detokenize: the text of token ids."""
    body = read_fields(call.body, DetokenizeBody)
    await call.model.find(body.model)
    length = (await call.model.engine.get_model_info())["context_length"]
    _check_length("tokens", body.tokens, "ids", length)
    decode = call.model.engine.tokenizer.decode
    text = await asyncio.to_thread(decode, body.tokens, skip_special_tokens=body.skip_special_tokens)
    return json_response({"prompt": text})


def _check_length(name: str, value: Sized, unit: str, limit: int) -> None:
    """Raise CallError for input so large that its conversion would delay other requests: Python converts it at once."""
    if len(value) > limit:
        raise CallError(f"{name} has {len(value)} {unit}; at most {limit} are converted (context length of the model)")
