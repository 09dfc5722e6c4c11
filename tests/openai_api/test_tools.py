"""Tool calls and reasoning in chats, with answers of a fake model: whole, streamed, and continued."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import openai
import pytest

from aioengine.openai import openai_router
from aioengine.testing.fake_engine import fake_async_engine
from tests.kit.constrained_answers import constrained_engine
from tests.openai_api.serving import Served, served

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def call_text(city: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


ANSWERS = {
    "two": f"<think>\nHm.\n</think>\n\nI look.\n{call_text('Lima')}\n{call_text('Rome')}",
    "think": "<think>2 + 3?</think>5",
    "cut": call_text("Lima")[:50],
    "wrong": f"I look.\n{call_text('Lima').replace('city', 'town')}",
    "": "Hello.",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with (
        constrained_engine(ANSWERS) as engine,
        served(engine, served_model_name="fake", tool_parser="hermes", reasoning_parser="think") as running,
    ):
        yield running


def ask(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="fake", messages=messages, **fields)


def test_calls_and_reasoning_are_split_off(client: openai.OpenAI) -> None:
    choice = ask(client, "two", tools=TOOLS).choices[0]
    message = choice.message
    assert message.reasoning_content == "Hm."
    assert message.content == "I look."
    calls = [(call.type, call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert calls == [("function", "weather", {"city": "Lima"}), ("function", "weather", {"city": "Rome"})]
    assert len({call.id for call in message.tool_calls}) == 2
    assert choice.finish_reason == "tool_calls"


def test_arguments_of_automatic_calls_fit_the_schema(client: openai.OpenAI) -> None:
    choice = ask(client, "wrong", tools=TOOLS, tool_choice="auto").choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert isinstance(arguments["city"], str), "the answer has an argument 'town'"


def test_streamed_calls_join_to_complete_calls(client: openai.OpenAI) -> None:
    whole = ask(client, "two", tools=TOOLS).choices[0].message
    with client.chat.completions.stream(
        model="fake", messages=[{"role": "user", "content": "two"}], tools=TOOLS
    ) as stream:
        choice = stream.get_final_completion().choices[0]
    streamed = choice.message
    assert streamed.content == whole.content
    assert [call.function.arguments for call in streamed.tool_calls or []] == [
        call.function.arguments for call in whole.tool_calls
    ]
    assert [call.function.name for call in streamed.tool_calls or []] == ["weather", "weather"]
    assert choice.finish_reason == "tool_calls"
    chunks = [chunk.choices[0].delta for chunk in ask(client, "two", tools=TOOLS, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in chunks) == "Hm."
    pieces = [call for delta in chunks for call in delta.tool_calls or []]
    assert len(pieces) > 6, "arguments come in pieces"
    assert [bool(piece.id) for piece in pieces if piece.index == 1] == [True] + [False] * (
        len([piece for piece in pieces if piece.index == 1]) - 1
    )


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}])
def test_calls_stay_content_without_tools(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    choice = ask(client, "two", **fields).choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content.count("<tool_call>") == 2
    assert choice.finish_reason == "stop"


def test_reasoning_needs_no_tools_and_n_answers_have_their_own(client: openai.OpenAI) -> None:
    for choice in ask(client, "think", n=2).choices:
        assert (choice.message.reasoning_content, choice.message.content) == ("2 + 3?", "5")


def test_call_that_is_cut_has_the_finish_reason_of_the_answer(client: openai.OpenAI) -> None:
    choice = ask(client, "two", tools=TOOLS, max_tokens=90).choices[0]
    assert choice.finish_reason == "length"


def test_history_of_calls_is_written_by_the_template(client: openai.OpenAI) -> None:
    calls = ask(client, "two", tools=TOOLS).choices[0].message
    messages: Any = [
        {"role": "user", "content": "How is it?"},
        calls.to_dict(),
        {"role": "tool", "tool_call_id": calls.tool_calls[0].id, "content": "warm"},
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
    ]
    answer = client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == "Hello."


def test_broken_stream_of_calls_continues(server: Served) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "two"}], "tools": TOOLS}
    whole = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    body |= {"stream": True, "resume_ttl": 20}
    texts = {"content": "", "reasoning_content": "", "arguments": ""}
    ids: list[str] = []
    last_id = finish = ""
    for num_lines in (9, 60, 90, 100_000):
        headers = {"Last-Event-ID": last_id} if last_id else {}
        with server.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            next_id = ""
            for line in islice(response.iter_lines(), num_lines):
                next_id = line.removeprefix("id: ") if line.startswith("id: ") else next_id
                if line.startswith("data: {"):
                    choice, last_id = json.loads(line.removeprefix("data: "))["choices"][0], next_id
                    finish = choice["finish_reason"] or ""
                    for name in ("content", "reasoning_content"):
                        texts[name] += choice["delta"].get(name, "")
                    for call in choice["delta"].get("tool_calls", ()):
                        texts["arguments"] += call["function"]["arguments"]
                        ids += [call["id"]] if "id" in call else []
    assert texts["content"] == whole["content"]
    assert texts["reasoning_content"] == whole["reasoning_content"]
    assert texts["arguments"] == "".join(call["function"]["arguments"] for call in whole["tool_calls"])
    assert len(ids) == 2
    assert finish == "tool_calls"


def test_unknown_parser_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'hermes'"):
        openai_router(fake_async_engine(), tool_parser="hermess")
