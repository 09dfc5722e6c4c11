"""/v1/responses: conversations of items, continued by ``previous_response_id``."""

from __future__ import annotations

import time
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from aioengine.errors import EngineError
from aioengine.openai.bodies import Body, add_constraint, read_generate_fields
from aioengine.openai.chat_calls import ChatCall, Part, PartReader, function_name, read_answer, tool_call_id
from aioengine.openai.conversations import template_messages
from aioengine.openai.http_call import event
from aioengine.openai.replies import CallError, check_completed, event_stream, json_response
from aioengine.parsing import Content, Reasoning

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from starlette.responses import Response

    from aioengine.api.answers import FinishReason
    from aioengine.api.stream import Stream
    from aioengine.openai.http_call import Call, Info
    from aioengine.openai.served_model import ServedModel

_KINDS: Final[dict[type, str]] = {Content: "response.output_text", Reasoning: "response.reasoning_text"}
_CALL: Final = "response.function_call_arguments"
"""Beginnings of the names of events with pieces of text."""


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


async def responses(call: Call) -> Response:
    """Answer a request to /v1/responses."""
    body, sampling = read_generate_fields(call.body, ResponsesBody)
    stored = call.model.stored_responses
    items = [{"type": "message", "role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if body.previous_response_id is not None:
        items = [*stored.find(body.previous_response_id)[1], *items]
    chat, name = await _chat_call(call, body, sampling, items)
    answer = _Response(call.model, body, name, items, chat)
    if body.stream:
        stream = await chat.stream(call.model)
        return event_stream(_events(stream, answer))
    generation = chat.generation(call.model)
    (whole,) = await call.answers(generation)
    answer.rid = generation.rid
    answer.parts = read_answer(chat.parser(call.model), whole["text"])
    info = whole["meta_info"]
    return json_response(answer.finished(info["finish_reason"], info))


async def show_response(call: Call) -> Response:
    """Answer GET /v1/responses/ID."""
    return json_response(call.model.stored_responses.find(call.request.path_params["response_id"])[0])


async def remove_response(call: Call) -> Response:
    """Answer DELETE /v1/responses/ID."""
    response_id = call.request.path_params["response_id"]
    call.model.stored_responses.remove(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def _chat_call(
    call: Call, body: ResponsesBody, sampling: dict[str, Any], items: list[dict[str, Any]]
) -> tuple[ChatCall, str]:
    """Return the call of a body, and the name of its model. ``items``: the whole conversation."""
    name, adapter = await call.model.find(body.model)
    add_constraint(sampling, (body.text or {}).get("format"))
    sampling["max_new_tokens"] = body.max_output_tokens
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    for place, item in enumerate(items):
        _add_item(messages, f"input[{place}]", item)
    effort = (body.reasoning or {}).get("effort")
    variables = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    choice = body.tool_choice
    chat = ChatCall(
        messages=template_messages(messages),
        sampling=sampling,
        options=call.options(adapter, timeout=body.timeout),
        variables=variables | (body.chat_template_kwargs or {}),
        tools=body.tools and [_tool(tool) for tool in body.tools],
        tool_choice=choice if isinstance(choice, str) else function_name(choice),
        parallel_tool_calls=body.parallel_tool_calls,
    )
    chat.prepare(call.model)
    return chat, name


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
                f"{name} is {str(item)[:200]}; there are messages (role, content), function_call, function_call_output "
                "and reasoning"
            )


def _content(name: str, content: Any) -> Any:
    if isinstance(content, str):
        return content
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
                raise CallError(
                    f"{name} has the part {str(part)[:200]}; there are input_text, output_text and input_image"
                )
    return parts


# ---------------------------------------------------------------- answers


class _Response:
    """A response that grows.

    Attributes:
        rid: the id of its request. parts: the parts of its answer.
    """

    def __init__(
        self, model: ServedModel, body: ResponsesBody, name: str, items: list[dict[str, Any]], chat: ChatCall
    ) -> None:
        self.rid = ""
        self.parts: list[Part] = []
        self.model = model
        self.chat = chat
        self._body = body
        self._name = name
        self._items = items
        self._created = int(time.time())

    def written(self, status: str, **fields: object) -> dict[str, Any]:
        """Return the JSON object of the response."""
        body = self._body
        return {
            "id": f"resp_{self.rid}",
            "object": "response",
            "created_at": self._created,
            "model": self._name,
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
        output = [self.item(index, status) for index in range(len(self.parts))]
        details = None if reason == "stop" else {"reason": "max_output_tokens"}
        response = self.written(status, output=output, usage=_usage(info), incomplete_details=details)
        if self._body.store:
            self.model.stored_responses.add(response, [*self._items, *output])
        return response

    def item(self, index: int, status: str) -> dict[str, Any]:
        """Return an item of the output. While ``in_progress``, it is empty."""
        part = self.parts[index]
        text = "" if status == "in_progress" else part.text
        item_id = f"{self.rid}_{index}"
        if part.kind is Reasoning:
            content = [{"type": "reasoning_text", "text": text}] if text else []
            return {"type": "reasoning", "id": f"rs_{item_id}", "summary": [], "content": content, "status": status}
        if part.kind is Content:
            content = [self.content(part)] if text else []
            return {
                "type": "message",
                "id": f"msg_{item_id}",
                "role": "assistant",
                "status": status,
                "content": content,
            }
        call_id = tool_call_id(self.model, self.rid, 0, part.call)
        call = {"call_id": call_id, "name": part.name, "arguments": text}
        return {"type": "function_call", "id": f"fc_{item_id}", "status": status, **call}

    def content(self, part: Part) -> dict[str, Any]:
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


def _usage(info: Info) -> dict[str, Any]:
    return {
        "input_tokens": info["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": info["cached_tokens"]},
        "output_tokens": info["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": info["prompt_tokens"] + info["completion_tokens"],
    }


async def _events(stream: Stream, answer: _Response) -> AsyncIterator[bytes]:
    """Yield the events of a stream: items begin, grow and end one after the other."""
    answer.rid = stream.rid
    reader, parser, numbers = PartReader(), answer.chat.parser(answer.model), count()
    answer.parts = reader.parts

    def write(kind: str, **fields: object) -> bytes:
        return event({"type": kind, "sequence_number": next(numbers), **fields}, name=kind)

    async with stream:  # a disconnect closes this generator, which aborts the request
        try:
            yield write("response.created", response=answer.written("in_progress"))
            yield write("response.in_progress", response=answer.written("in_progress"))
            num_begun = 0
            async for chunk in stream:
                reason = chunk["meta_info"]["finish_reason"]
                for part, text in reader.read(parser.push(chunk["text"]) + (parser.flush() if reason else [])):
                    index = next(index for index, entry in enumerate(reader.parts) if entry is part)
                    if index == num_begun:
                        if index:
                            for kind, fields in _item_end(answer, index - 1):
                                yield write(kind, **fields)
                        for kind, fields in _item_begin(answer, index):
                            yield write(kind, **fields)
                        num_begun += 1
                    if text:
                        yield write(f"{_KINDS.get(part.kind, _CALL)}.delta", **_place(answer, index), delta=text)
                if reason is not None:
                    if num_begun:
                        for kind, fields in _item_end(answer, num_begun - 1):
                            yield write(kind, **fields)
                    response = answer.finished(reason, chunk["meta_info"])
                    yield write(f"response.{response['status']}", response=response)
        except (EngineError, ValueError, TypeError) as error:  # the status was sent before the first chunk
            failure = {"code": "server_error", "message": str(error)}
            yield write("response.failed", response=answer.written("failed", error=failure))


def _place(answer: _Response, index: int) -> dict[str, object]:
    """Return the fields of an event about an item."""
    part = answer.parts[index]
    place: dict[str, object] = {"item_id": answer.item(index, "in_progress")["id"], "output_index": index}
    if part.kind in _KINDS:
        place["content_index"] = 0
    if part.kind is Content:
        place["logprobs"] = []
    return place


def _item_begin(answer: _Response, index: int) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "response.output_item.added", {"output_index": index, "item": answer.item(index, "in_progress")}
    if answer.parts[index].kind is Content:
        place = {key: value for key, value in _place(answer, index).items() if key != "logprobs"}
        empty = answer.content(Part(Content))
        yield "response.content_part.added", place | {"part": empty}


def _item_end(answer: _Response, index: int) -> Iterator[tuple[str, dict[str, Any]]]:
    part, place = answer.parts[index], _place(answer, index)
    if part.kind in _KINDS:
        yield f"{_KINDS[part.kind]}.done", place | {"text": part.text}
    else:
        yield f"{_CALL}.done", place | {"arguments": part.text, "name": part.name}
    if part.kind is Content:
        place.pop("logprobs")
        yield "response.content_part.done", place | {"part": answer.content(part)}
    yield "response.output_item.done", {"output_index": index, "item": answer.item(index, "completed")}
