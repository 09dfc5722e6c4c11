"""/v1/chat/completions: answer conversations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from starlette.responses import Response

from aioengine.openai import token_logprobs
from aioengine.openai.bodies import GenerateBody, add_constraint, read_generate_fields
from aioengine.openai.chat_calls import AnswerReader, chat_call
from aioengine.openai.choices import Choices, Piece, limit_length
from aioengine.openai.http_call import HttpCall, Info, finish_word
from aioengine.parsing import Content, ToolCallBegin


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


async def chat_completions(call: HttpCall) -> Response:
    """Answer a request to /v1/chat/completions."""
    body, sampling = read_generate_fields(call.body, ChatBody)
    if body.modalities != ("text",):
        raise ValueError(f"modalities is {list(body.modalities)}; answers are text")
    add_constraint(sampling, body.response_format, body.structured_outputs)
    limit_length(sampling, default=None)
    variables = {name: value for name in _VARIABLES if (value := getattr(body, name)) is not None}
    logprob_options = token_logprobs.options(body.top_logprobs) if body.logprobs else {}
    chat = await chat_call(
        call,
        body,
        body.messages,
        sampling,
        {"timeout": body.timeout, "resume_ttl": body.resume_ttl, **logprob_options},
        template=body.chat_template,
        variables=variables | (body.chat_template_kwargs or {}),
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
    )

    write = partial(token_logprobs.chat_logprobs, call.model.engine) if body.logprobs else None

    def new_row(rid: str, index: int) -> Callable[[Piece], dict[str, Any] | None]:
        return partial(_choice, index, body, chat.reader(), partial(chat.tool_call_id, rid, index), write)

    return await Choices(
        prefix="chatcmpl",
        kind="chat.completion",
        chunk_kind="chat.completion.chunk",
        name=chat.name,
        sampling=sampling,
        start=chat.start(),
        new_row=new_row,
    ).answer(call, body)


def _choice(
    index: int,
    body: ChatBody,
    reader: AnswerReader,
    id_of_call: Callable[[int], str],
    write_logprobs: Callable[[Info, int], dict[str, object]] | None,
    piece: Piece,
) -> dict[str, Any] | None:
    """Return the choice of a piece; None: there is nothing to send yet, because its text may begin a tag."""
    reason = piece.info["finish_reason"]
    if piece.seen:
        list(reader.read(piece.seen, is_last=False))  # the client has this text: only the parser needs it
    delta = _delta(reader, piece.text, id_of_call, is_last=reason is not None)
    if body.stream:
        content = {"delta": {"role": "assistant", "content": "", **delta} if piece.is_first else delta}
        if not delta and reason is None and not body.logprobs and not piece.is_first:
            return None
    else:
        for tool_call in delta.get("tool_calls", ()):
            del tool_call["index"]
        empty = {"role": "assistant", "content": None if reader.has_calls else "", "refusal": None}
        content = {"message": empty | delta}
    return {
        "index": index,
        **content,
        "finish_reason": "tool_calls" if reason == "stop" and reader.has_calls else finish_word(reason),
        "logprobs": write_logprobs(piece.info, piece.num_seen) if write_logprobs else None,
    }


def _delta(reader: AnswerReader, text: str, id_of_call: Callable[[int], str], *, is_last: bool) -> dict[str, Any]:
    """Read text, and return the new content, reasoning and tool calls."""
    delta: dict[str, Any] = {}
    for change, part, new_text in reader.read(text, is_last=is_last):
        if change == "end":
            continue
        if part.kind is not ToolCallBegin:
            key = "content" if part.kind is Content else "reasoning_content"
            delta[key] = delta.get(key, "") + new_text
            continue
        tool_calls: list[dict[str, Any]] = delta.setdefault("tool_calls", [])
        if change == "begin":
            function = {"name": part.name, "arguments": ""}
            call_id = id_of_call(part.call)
            tool_calls.append({"index": part.call, "id": call_id, "type": "function", "function": function})
        elif not tool_calls:
            tool_calls.append({"index": part.call, "function": {"arguments": new_text}})
        else:
            tool_calls[-1]["function"]["arguments"] += new_text
    return delta
