"""Anthropic's client: messages, tools, thinking, events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.kit.constrained_answers import constrained_engine
from tests.openai_api.serving import Served, served
from tests.openai_api.test_tools import ANSWERS

if TYPE_CHECKING:
    import anthropic

TOOLS: Any = [
    {
        "name": "weather",
        "description": "The weather of a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    options = {"tool_parser": "hermes", "reasoning_parser": "think", "api_key": "secret"}
    with constrained_engine(ANSWERS) as engine, served(engine, served_model_name="fake", **options) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[anthropic.Anthropic]:
    import anthropic  # takes two seconds, and all workers read this file

    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
        yield client


def messages(text: str) -> Any:
    return [{"role": "user", "content": [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]}]


def test_message_has_text_and_usage(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model="fake", max_tokens=20, messages=messages("Hi"), system="Be brief.")
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "Hello."}]
    assert (answer.stop_reason, answer.role, answer.type) == ("end_turn", "assistant", "message")
    counted = client.messages.count_tokens(model="fake", messages=messages("Hi"), system="Be brief.")
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == counted.input_tokens
    assert answer.usage.output_tokens == 7


def test_stop_reasons(client: anthropic.Anthropic) -> None:
    short = client.messages.create(model="fake", max_tokens=3, messages=messages("Hi"))
    assert (short.stop_reason, short.content[0].to_dict()["text"]) == ("max_tokens", "Hel")
    stopped = client.messages.create(model="fake", max_tokens=20, messages=messages("Hi"), stop_sequences=["lo"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "lo")


def test_tool_use_and_thinking_are_blocks(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model="fake", max_tokens=300, messages=messages("two"), tools=TOOLS)
    kinds = [block.type for block in answer.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in answer.content if block.type == "tool_use"] == [{"city": "Lima"}, {"city": "Rome"}]
    assert answer.stop_reason == "tool_use"
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "warm"}]}
        for block in answer.content
        if block.type == "tool_use"
    ]
    history: Any = [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "And now?"}]},
    ]
    last = client.messages.create(model="fake", max_tokens=20, messages=history, tools=TOOLS)
    assert last.content[0].to_dict()["text"] == "Hello."


def test_input_of_automatic_calls_fits_the_schema(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model="fake", max_tokens=300, messages=messages("wrong"), tools=TOOLS)
    text, call = answer.content
    assert (text.type, call.type, answer.stop_reason) == ("text", "tool_use", "tool_use")
    assert isinstance(call.to_dict()["input"]["city"], str), "the answer has an argument 'town'"


def test_streamed_message_equals_the_complete_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model="fake", max_tokens=300, messages=messages("two"), tools=TOOLS)
    with client.messages.stream(model="fake", max_tokens=300, messages=messages("two"), tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()

    def plain(message: Any) -> list[dict[str, Any]]:
        return [{key: value for key, value in block.to_dict().items() if key != "id"} for block in message.content]

    assert plain(streamed) == plain(whole)
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_errors_have_the_form_of_anthropic(server: Served, client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(model="fake", max_tokens=3, messages=messages("Hi"), extra_body={"temperature": 9})
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nosuch", max_tokens=3, messages=messages("Hi"))
    wrong = anthropic.Anthropic(base_url=server.url, api_key="wrong")
    with wrong, pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(model="fake", max_tokens=3, messages=messages("Hi"))
    response = server.post("/v1/messages", {"messages": []}, headers={"x-api-key": "secret"})
    assert response.status_code == 400
    assert json.loads(response.content)["error"] == {
        "type": "invalid_request_error",
        "message": "max_tokens is missing: the maximum number of output tokens",
    }


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice must have the name of a tool, got {'type': 'tool'}"),
        ({"stream": True, "resume_ttl": 5}, "resume_ttl is not supported: only the streams of /v1/chat/completions"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"mcp_servers": []}, "mcp_servers"),
    ],
)
def test_unsupported_parts_are_refused_by_name(server: Served, fields: dict[str, Any], reason: str) -> None:
    body = {"max_tokens": 5, "messages": messages("Hi")} | fields
    response = server.post("/v1/messages", body, headers={"x-api-key": "secret"})
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]
