"""/v1/responses with OpenAI's client: items, events, tools, and conversations that continue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from aioengine.openai.replies import CallError
from aioengine.openai.stored_responses import StoredResponses
from tests.kit.constrained_answers import constrained_engine
from tests.openai_api.serving import Served, served
from tests.openai_api.test_tools import ANSWERS, TOOLS

FUNCTION: Any = {"type": "function", **TOOLS[0]["function"], "strict": False}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    options = {"tool_parser": "hermes", "reasoning_parser": "think"}
    answers = ANSWERS | {"Again": "Hello again."}
    with constrained_engine(answers) as engine, served(engine, served_model_name="fake", **options) as running:
        yield running


def test_response_has_text_and_usage(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="Hi", instructions="Be brief.")
    assert (answer.output_text, answer.status, answer.model) == ("Hello.", "completed", "fake")
    assert answer.usage is not None
    assert answer.usage.output_tokens == 7
    assert client.responses.retrieve(answer.id).output_text == "Hello."


def test_response_continues_the_previous_one(client: openai.OpenAI) -> None:
    first = client.responses.create(model="fake", input="Hi")
    second = client.responses.create(model="fake", input="Again", previous_response_id=first.id)
    assert second.output_text == "Hello again."
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError, match="is not stored"):
        client.responses.create(model="fake", input="Again", previous_response_id=second.id)
    hidden = client.responses.create(model="fake", input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(hidden.id)


def test_calls_and_reasoning_are_items(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="two", tools=[FUNCTION])
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [call.arguments for call in calls] == ['{"city": "Lima"}', '{"city": "Rome"}']
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "warm"} for call in calls]
    last = client.responses.create(
        model="fake",
        input=[*results, {"role": "user", "content": [{"type": "input_text", "text": "Again"}]}],
        previous_response_id=answer.id,
        tools=[FUNCTION],
    )
    assert last.output_text == "Hello again."


def test_streamed_response_equals_the_complete_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="fake", input="two", tools=[FUNCTION])
    with client.responses.stream(model="fake", input="two", tools=[FUNCTION]) as stream:
        events = list(stream)
        streamed = stream.get_final_response()

    def plain(response: Any) -> list[dict[str, Any]]:
        rows = [item.to_dict() for item in response.output]
        return [{key: row.get(key) for key in ("type", "name", "arguments", "status")} for row in rows]

    assert plain(streamed) == plain(whole)
    assert streamed.output_text == whole.output_text == "I look."
    assert [event.sequence_number for event in events] == sorted(event.sequence_number for event in events)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    assert "response.reasoning_text.delta" in kinds
    again = client.responses.create(model="fake", input="Again", previous_response_id=streamed.id)
    assert again.output_text == "Hello again."


def test_short_response_is_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="Hi", max_output_tokens=3)
    assert (answer.output_text, answer.status) == ("Hel", "incomplete")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    kinds = [
        event.type for event in client.responses.create(model="fake", input="Hi", max_output_tokens=3, stream=True)
    ]
    assert kinds[-1] == "response.incomplete"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"background": True}, "background is not supported"),
        ({"tools": [{"type": "web_search"}]}, "only functions"),
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input_audio"),
        ({"input": [{"role": "user", "content": None}]}, "input[0] must have a text or a list of parts, got None"),
        ({"temprature": 1}, "did you mean"),
    ],
)
def test_unsupported_parts_are_refused_by_name(server: Served, fields: dict[str, Any], reason: str) -> None:
    response = server.post("/v1/responses", {"input": "Hi"} | fields)
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]


def test_oldest_responses_are_forgotten() -> None:
    stored = StoredResponses(max_bytes=1000)
    for number in range(5):
        stored.add({"id": str(number), "tools": ["x" * 200]}, [{"text": "x" * 200}])
    assert [stored.find(str(number))[0]["id"] for number in (3, 4)] == ["3", "4"]
    stored.remove("4")
    for gone in ("0", "4"):
        with pytest.raises(CallError, match="is not stored"):
            stored.find(gone)
