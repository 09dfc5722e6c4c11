"""/v1/responses: conversations of items, continued by ``previous_response_id``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from itertools import count
from typing import Any, Final

from msgspec import Struct, field
from starlette.responses import Response

from aioengine.api.answers import FinishReason
from aioengine.api.stream import Stream
from aioengine.openai.bodies import Body, add_constraint, read_generate_fields
from aioengine.openai.chat_calls import AnswerReader, ChatCall, Part, chat_call, function_name
from aioengine.openai.http_call import HttpCall, Info, event
from aioengine.openai.replies import CallError, Errors, EventStream, check_completed, json_response
from aioengine.parsing import Content, Reasoning, ToolCallBegin

_KINDS: Final[dict[type, tuple[str, str]]] = {
    Content: ("msg", "response.output_text"),
    Reasoning: ("rs", "response.reasoning_text"),
    ToolCallBegin: ("fc", "response.function_call_arguments"),
}
"""Kind of a part -> the beginnings of the ids of its items, and of the names of events with pieces of its text."""


class ResponsesBody(Body, kw_only=True):
    """The fields of /v1/responses. Sampling parameters are beside them.

    Attributes:
        store: whether the response can be continued and read again.
    """

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    timeout: float | None = None
    truncation: str | None = None
    include: list[str] | None = None


async def responses(call: HttpCall) -> Response:
    """Answer a request to /v1/responses."""
    body, sampling = read_generate_fields(call.body, ResponsesBody)
    stored = call.model.stored_responses
    items = [{"type": "message", "role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if body.previous_response_id is not None:
        items = [*stored.find(body.previous_response_id)[1], *items]
    chat = await _chat_call(call, body, sampling, items)
    start, reader = chat.start(), chat.reader()
    if body.stream:
        stream = await start(stream=True)
        answer = _Response(body, chat, items, reader, stream.rid)
        write = _writer()

        def failed(error: Errors) -> bytes:
            failure = {"code": "server_error", "message": str(error)}
            return write("response.failed", response=answer.written("failed", error=failure))

        return EventStream(stream, _events(stream, answer, write), failed)
    generation = start()
    (whole,) = await call.answers(generation)
    reader.read_all(whole["text"])
    info = whole["meta_info"]
    answer = _Response(body, chat, items, reader, generation.rid)
    return json_response(answer.finished(info["finish_reason"], info))


async def show_response(call: HttpCall) -> Response:
    """Answer GET /v1/responses/ID."""
    return json_response(call.model.stored_responses.find(call.request.path_params["response_id"])[0])


async def remove_response(call: HttpCall) -> Response:
    """Answer DELETE /v1/responses/ID."""
    response_id = call.request.path_params["response_id"]
    call.model.stored_responses.remove(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def _chat_call(
    call: HttpCall, body: ResponsesBody, sampling: dict[str, Any], items: list[dict[str, Any]]
) -> ChatCall:
    """Return the call of a body. ``items``: the whole conversation."""
    add_constraint(sampling, (body.text or {}).get("format"))
    sampling["max_new_tokens"] = body.max_output_tokens
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    for place, item in enumerate(items):
        _add_item(messages, f"input[{place}]", item)
    effort = (body.reasoning or {}).get("effort")
    variables = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    choice = body.tool_choice
    return await chat_call(
        call,
        body,
        messages,
        sampling,
        {"timeout": body.timeout},
        variables=variables | (body.chat_template_kwargs or {}),
        tools=body.tools and [_tool(tool) for tool in body.tools],
        tool_choice=choice if isinstance(choice, str) else function_name(choice),
        parallel_tool_calls=body.parallel_tool_calls,
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise CallError(f"a tool has the type {tool.get('type')!r}; the server has no tools of its own, only functions")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


_TEXTS: Final = ("input_text", "output_text", "text")


def _add_item(messages: list[dict[str, Any]], name: str, item: dict[str, Any]) -> None:
    """Add an item of a conversation to the messages of a chat. Calls and reasoning belong to the message after them."""
    match item:
        case {"type": "function_call", "call_id": str(call_id), "name": str(function), "arguments": str(arguments)}:
            call = {"id": call_id, "type": "function", "function": {"name": function, "arguments": arguments}}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        case {"type": "function_call_output", "call_id": str(call_id), "output": output}:
            messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(name, output)})
        case {"type": "reasoning"}:
            parts: list[Any] = item.get("content") or []
            text = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
            messages.append({"role": "assistant", "content": None, "reasoning_content": text})
        case {"role": str(role), "content": content}:
            if role == "assistant" and messages and messages[-1].get("content", "") is None:
                messages[-1]["content"] = _content(name, content)
            else:
                messages.append({"role": role, "content": _content(name, content)})
        case _:
            raise CallError(
                f"{name} is {str(item)[:200]}; allowed: messages (role, content), function_call, function_call_output, "
                "reasoning"
            )


def _content(name: str, content: Any) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise CallError(f"{name} must have a text or a list of parts, got {str(content)[:200]}")
    parts: list[dict[str, Any]] = []
    for part in content:
        match part:
            case {"type": kind, "text": str(text)} if kind in _TEXTS:
                parts.append({"type": "text", "text": text})
            case {"type": "input_image", "image_url": str(url)}:
                parts.append({"type": "image_url", "image_url": {"url": url}})
            case {"type": "refusal"}:
                parts.append(part)
            case _:
                raise CallError(f"{name} has the part {str(part)[:200]}; allowed: input_text, output_text, input_image")
    return parts


# ---------------------------------------------------------------- answers


class _Response(Struct):
    """A response that grows. ``items``: the conversation before it. ``rid``: the id of its request."""

    body: ResponsesBody
    chat: ChatCall
    items: list[dict[str, Any]]
    reader: AnswerReader
    rid: str
    created: int = field(default_factory=lambda: int(time.time()))

    def written(self, status: str, **fields: object) -> dict[str, Any]:
        """Return the JSON object of the response."""
        body = self.body
        return {
            "id": f"resp_{self.rid}",
            "object": "response",
            "created_at": self.created,
            "model": self.chat.name,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "previous_response_id": body.previous_response_id,
            "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": body.parallel_tool_calls,
            "tool_choice": body.tool_choice,
            "tools": body.tools or [],
            "temperature": self.chat.sampling.get("temperature"),
            "top_p": self.chat.sampling.get("top_p"),
            "store": body.store,
            "metadata": {},
            "output": [],
            "usage": None,
            **fields,
        }

    def finished(self, reason: FinishReason, info: Info) -> dict[str, Any]:
        """Return the whole response, and store it. Raises EngineError if the server ended it early."""
        check_completed(reason)
        status = "completed" if reason == "stop" else "incomplete"
        output = [self.item(part, status) for part in self.reader.parts]
        details = None if reason == "stop" else {"reason": "max_output_tokens"}
        response = self.written(status, output=output, usage=_usage(info), incomplete_details=details)
        if self.body.store:
            self.chat.model.stored_responses.add(response, [*self.items, *output])
        return response

    def item_id(self, part: Part) -> str:
        return f"{_KINDS[part.kind][0]}_{self.rid}_{part.index}"

    def item(self, part: Part, status: str) -> dict[str, Any]:
        """Return an item of the output. At the beginning of the part, it is empty."""
        item = {"id": self.item_id(part), "status": status}
        if part.kind is Reasoning:
            content = [{"type": "reasoning_text", "text": part.text}] if part.text else []
            return {"type": "reasoning", "summary": [], "content": content, **item}
        if part.kind is Content:
            content = [_content_part(part)] if part.text else []
            return {"type": "message", "role": "assistant", "content": content, **item}
        call_id = self.chat.tool_call_id(self.rid, 0, part.call)
        return {"type": "function_call", "call_id": call_id, "name": part.name, "arguments": part.text, **item}


def _content_part(part: Part) -> dict[str, Any]:
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


def _usage(info: Info) -> dict[str, Any]:
    return {
        "input_tokens": info["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": info["cached_tokens"]},
        "output_tokens": info["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": info["prompt_tokens"] + info["completion_tokens"],
    }


def _writer() -> Callable[..., bytes]:
    """Return a function that writes numbered events."""
    numbers = count()

    def write(kind: str, **fields: object) -> bytes:
        return event({"type": kind, "sequence_number": next(numbers), **fields}, name=kind)

    return write


async def _events(stream: Stream, answer: _Response, write: Callable[..., bytes]) -> AsyncGenerator[bytes]:
    """Yield the events of a stream: items begin, grow and end one after the other."""
    yield write("response.created", response=answer.written("in_progress"))
    yield write("response.in_progress", response=answer.written("in_progress"))
    async for chunk in stream:
        reason = chunk["meta_info"]["finish_reason"]
        for change, part, text in answer.reader.read(chunk["text"], is_last=reason is not None):
            for kind, fields in _events_of_item(answer, change, part, text):
                yield write(kind, **fields)
        if reason is not None:
            response = answer.finished(reason, chunk["meta_info"])
            yield write(f"response.{response['status']}", response=response)


def _events_of_item(answer: _Response, change: str, part: Part, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and the fields of the events when an item begins, grows by ``text``, or ends."""
    is_text, is_call = part.kind is Content, part.kind is ToolCallBegin
    place: dict[str, Any] = {"item_id": answer.item_id(part), "output_index": part.index}
    if not is_call:
        place["content_index"] = 0
    logprobs: dict[str, Any] = {"logprobs": []} if is_text else {}
    _, name = _KINDS[part.kind]
    if change == "begin":
        yield "response.output_item.added", {"output_index": part.index, "item": answer.item(part, "in_progress")}
        if is_text:
            yield "response.content_part.added", {**place, "part": _content_part(part)}
    elif change == "text":
        yield f"{name}.delta", {**place, **logprobs, "delta": text}
    else:
        done = {"arguments": part.text, "name": part.name} if is_call else {"text": part.text}
        yield f"{name}.done", {**place, **logprobs, **done}
        if is_text:
            yield "response.content_part.done", {**place, "part": _content_part(part)}
        yield "response.output_item.done", {"output_index": part.index, "item": answer.item(part, "completed")}
