"""/v1/messages: conversations in Anthropic's form."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Final

from msgspec import DecodeError
from msgspec.json import decode
from starlette.responses import Response

from aioengine.api.answers import FinishReason
from aioengine.api.stream import Stream
from aioengine.openai.bodies import Body, read_generate_fields
from aioengine.openai.chat_calls import AnswerReader, ChatCall, Part, chat_call, function_name
from aioengine.openai.http_call import HttpCall, Info, event
from aioengine.openai.replies import CallError, Errors, EventStream, anthropic_error, check_completed, json_response
from aioengine.parsing import Content, Reasoning

_TOOL_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


class MessagesBody(Body, kw_only=True):
    """The fields of /v1/messages. Sampling parameters are beside them, also ``max_tokens`` and ``stop_sequences``."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    stream: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    timeout: float | None = None


async def anthropic_messages(call: HttpCall) -> Response:
    """Answer a request to /v1/messages."""
    if call.body.get("max_tokens") is None:
        raise CallError("max_tokens is missing: the maximum number of output tokens")
    chat = await _chat_call(call)
    start = chat.start()
    if call.body.get("stream"):
        stream = await start(stream=True)
        return EventStream(stream, _events(stream, chat), _failed)
    generation = start()
    (answer,) = await call.answers(generation)
    reader, info = chat.reader(), answer["meta_info"]
    blocks = [_block(part, chat, generation.rid) for part in reader.read_all(answer["text"])]
    end = {"content": blocks, **_stop(info["finish_reason"], reader), "usage": _usage(info)}
    return json_response(_head(generation.rid, chat.name) | end)


async def count_tokens(call: HttpCall) -> Response:
    """Answer a request to /v1/messages/count_tokens."""
    chat = await _chat_call(call)
    chat.sampling = {"max_new_tokens": 0}
    (answer,) = await call.answers(chat.start()())
    return json_response({"input_tokens": answer["meta_info"]["prompt_tokens"]})


async def _chat_call(call: HttpCall) -> ChatCall:
    """Return the call of a body."""
    body, sampling = read_generate_fields(call.body, MessagesBody)
    messages = [] if body.system is None else [{"role": "system", "content": _texts("system", body.system)}]
    for place, message in enumerate(body.messages):
        messages += _messages(f"messages[{place}]", message)
    variables = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        variables.setdefault("enable_thinking", body.thinking.get("type") != "disabled")
    choice = body.tool_choice or {"type": "auto"}
    kind = choice.get("type")
    if kind != "tool" and kind not in _TOOL_CHOICES:
        raise CallError(f"tool_choice.type is {kind!r}; allowed: {', '.join(_TOOL_CHOICES)}, tool")
    return await chat_call(
        call,
        body,
        messages,
        sampling,
        {"timeout": body.timeout},
        variables=variables,
        tools=body.tools and [_tool(tool) for tool in body.tools],
        tool_choice=function_name(choice) if kind == "tool" else _TOOL_CHOICES[kind],
        parallel_tool_calls=not choice.get("disable_parallel_tool_use", False),
    )


# ---------------------------------------------------------------- from Anthropic's form to OpenAI's


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if "input_schema" not in tool:
        raise CallError(
            f"a tool must have name and input_schema (the server has none of its own), got {str(tool)[:200]}"
        )
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function | {key: tool[key] for key in ("description",) if key in tool}}


def _texts(name: str, content: object) -> Any:
    """Return a text, or text blocks without their other keys (``cache_control``). Raises CallError."""
    match content:
        case str():
            return content
        case [*blocks] if all(isinstance(block, dict) and block.get("type") == "text" for block in blocks):
            return [{"type": "text", "text": block.get("text")} for block in blocks]
        case _:
            raise CallError(f"{name} must be a text or a list of text blocks, got {str(content)[:200]}")


def _messages(name: str, message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one message, and one per tool result before it."""
    content = message.get("content")
    if not isinstance(content, list):
        return [message]
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    own: dict[str, Any] = {"role": message.get("role"), "content": parts}
    for place, block in enumerate(content):
        match block:
            case {"type": "text", "text": str(text)}:
                parts.append({"type": "text", "text": text})
            case {"type": "image", "source": {"type": "base64", "media_type": str(media), "data": str(data)}}:
                parts.append({"type": "image_url", "image_url": {"url": f"data:{media};base64,{data}"}})
            case {"type": "image", "source": {"type": "url", "url": str(url)}}:
                parts.append({"type": "image_url", "image_url": {"url": url}})
            case {"type": "tool_use", "id": str(call_id), "name": str(function), "input": dict(arguments)}:
                call = {"id": call_id, "type": "function", "function": {"name": function, "arguments": arguments}}
                own.setdefault("tool_calls", []).append(call)
            case {"type": "tool_result", "tool_use_id": str(call_id)}:
                texts = _texts(f"{name}.content[{place}].content", block.get("content") or "")
                results.append({"role": "tool", "tool_call_id": call_id, "content": texts})
            case {"type": "thinking", "thinking": str(text)}:
                own["reasoning_content"] = own.get("reasoning_content", "") + text
            case {"type": "redacted_thinking"}:
                pass
            case _:
                raise CallError(
                    f"{name}.content[{place}] is {str(block)[:200]}; allowed: text, image (base64 or url), tool_use, "
                    "tool_result, thinking, redacted_thinking"
                )
    if not parts and "tool_calls" in own:
        own["content"] = None
    return results if results and not parts else [*results, own]


# ---------------------------------------------------------------- answers


def _head(rid: str, model: str) -> dict[str, Any]:
    return {"id": f"msg_{rid}", "type": "message", "role": "assistant", "model": model}


def _usage(info: Info) -> dict[str, int]:
    cached = info["cached_tokens"]
    return {
        "input_tokens": info["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": info["completion_tokens"],
    }


def _stop(reason: FinishReason, reader: AnswerReader) -> dict[str, object]:
    check_completed(reason)
    matched = None
    if reason != "stop":
        word = "max_tokens"
    elif reader.has_calls:
        word = "tool_use"
    elif isinstance(reason["matched"], str):
        word, matched = "stop_sequence", reason["matched"]
    else:
        word = "end_turn"
    return {"stop_reason": word, "stop_sequence": matched}


def _block(part: Part, chat: ChatCall, rid: str) -> dict[str, Any]:
    """Return the content block of a part. At the beginning of the part, it is empty."""
    if part.kind is Content:
        return {"type": "text", "text": part.text}
    if part.kind is Reasoning:
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    try:
        arguments: object = decode(part.text)
    except (DecodeError, RecursionError):  # it begins, it was cut by max_tokens, or it is nested too deeply
        arguments = {}
    return {"type": "tool_use", "id": chat.tool_call_id(rid, 0, part.call), "name": part.name, "input": arguments}


def _delta(part: Part, text: str) -> dict[str, str]:
    if part.kind is Content:
        return {"type": "text_delta", "text": text}
    if part.kind is Reasoning:
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}


def _event(kind: str, **fields: object) -> bytes:
    return event({"type": kind, **fields}, name=kind)


def _failed(error: Errors) -> bytes:
    return event(anthropic_error(error)[1], name="error")


async def _events(stream: Stream, chat: ChatCall) -> AsyncGenerator[bytes]:
    """Yield the events of a stream: blocks begin, grow and end one after the other."""
    reader, is_begun = chat.reader(), False
    async for chunk in stream:
        info = chunk["meta_info"]
        if not is_begun:
            is_begun = True
            usage = _usage(info) | {"output_tokens": 0}
            empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            yield _event("message_start", message=_head(stream.rid, chat.name) | empty)
        reason = info["finish_reason"]
        for change, part, text in reader.read(chunk["text"], is_last=reason is not None):
            if change == "begin":
                block = _block(part, chat, stream.rid)
                yield _event("content_block_start", index=part.index, content_block=block)
            elif change == "text":
                yield _event("content_block_delta", index=part.index, delta=_delta(part, text))
            else:
                yield _event("content_block_stop", index=part.index)
        if reason is not None:
            yield _event("message_delta", delta=_stop(reason, reader), usage=_usage(info))
            yield _event("message_stop")
