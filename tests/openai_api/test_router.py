"""The router without a model: keys, limits, statuses, model names, disconnects, probes, resumed streams."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import aioengine
from aioengine.openai import openai_router
from aioengine.openai.bodies import GenerateBody
from aioengine.openai.choices import Choices
from aioengine.openai.http_call import StreamPosition
from aioengine.testing.fake_engine import fake_async_engine
from aioengine.text import stop
from tests.kit.fake_adapters import write_adapter
from tests.kit.source import imports, modules
from tests.kit.waiting import wait_until
from tests.openai_api.serving import Served, served

CHAT = "/v1/chat/completions"
LONG = {"model": "fake", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """One request runs, one waits, more are refused."""
    engine = fake_async_engine(max_running=1, max_queued=1, max_loras_per_batch=1)
    with served(engine, api_key=["first", "second"], served_model_name="fake", max_body_bytes=20_000) as running:
        running.client.headers["Authorization"] = "Bearer first"
        yield running


def client_of(server: Served, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="second", **options)


def chat(text: str, **fields: object) -> dict[str, object]:
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **fields}


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


# ---------------------------------------------------------------- keys, sizes, ids


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer third"}, {"Authorization": "first"}, {"x-api-key": ""}]
)
def test_missing_or_wrong_key_is_status_401(server: Served, headers: dict[str, str]) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", CHAT)):
        response = httpx.request(method, server.url + path, headers=headers)
        assert response.status_code == 401
        assert error_of(response)["code"] == "invalid_api_key"


def test_every_key_and_both_headers_are_accepted(server: Served) -> None:
    for headers in ({"Authorization": "bearer second"}, {"x-api-key": "first"}):
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200


def test_probes_need_no_key(server: Served) -> None:
    for path in ("/health", "/ready"):
        response = httpx.get(server.url + path)
        assert (response.status_code, response.json()) == (200, {"state": "running"})


def test_empty_key_is_refused() -> None:
    with pytest.raises(ValueError, match="api_key is empty"):
        openai_router(fake_async_engine(), api_key="")


def test_large_body_is_status_413(server: Served) -> None:
    response = server.post(CHAT, chat("x" * 20_000))
    assert response.status_code == 413
    assert "max_body_bytes" in error_of(response)["message"]


def test_request_id_of_the_client_is_returned(server: Served) -> None:
    response = server.client.get("/v1/models", headers={"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    first, two = (server.client.get("/v1/models/nosuch").headers["x-request-id"] for _ in range(2))
    assert first != two


# ---------------------------------------------------------------- wrong requests

WRONG: dict[str, tuple[str, dict[str, object], str]] = {
    "unknown field": (CHAT, chat("x", temprature=1), "did you mean 'temperature'"),
    "wrong value": (CHAT, chat("x", temperature=3), "temperature must be a number from 0 to 2"),
    "wrong type": (CHAT, chat("x", stream="yes"), "stream"),
    "no messages": (CHAT, {"model": "fake"}, "messages"),
    "empty messages": (CHAT, {"model": "fake", "messages": []}, "messages is empty"),
    "unknown role": (CHAT, {"messages": [{"content": "x"}]}, "has no role"),
    "audio": (CHAT, chat("x", modalities=["text", "audio"]), "modalities"),
    "suffix": ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix is not supported"),
    "best of": ("/v1/completions", {"prompt": "x", "best_of": 2}, "best_of is not supported"),
    "too long": ("/v1/completions", {"prompt": "x" * 3000}, "does not fit"),
    "format": (CHAT, chat("x", response_format={"type": "xml"}), "response_format"),
    "schema": (CHAT, chat("x", response_format={"type": "json_schema", "json_schema": {}}), "json_schema.schema"),
    "two formats": (CHAT, chat("x", response_format={"type": "json_object"}, regex="a"), "regex"),
    "prompt of objects": ("/v1/completions", {"prompt": [{}]}, "prompt"),
    "template": (CHAT, chat("x", chat_template="{{ 1 }}"), "chat_template must be the name"),
    "echo of a part": (
        "/v1/completions",
        {"prompt": "x", "echo": True, "truncate_prompt_tokens": 1},
        "echo does not work",
    ),
    "echo of texts and ids": ("/v1/completions", {"prompt": ["x", 1], "echo": True}, "prompt[1]"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_request_is_status_400_with_the_reason(server: Served, case: str, stream: bool) -> None:
    path, body, reason = WRONG[case]
    response = server.post(path, {"stream": stream} | body)
    assert response.status_code == 400
    error = error_of(response)
    assert reason in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"a": "\xff"}', b"[" * 9000 + b"]" * 9000, b'{"prompt": "\\ud800"}']
)
def test_body_that_is_not_a_json_object_is_status_400(server: Served, content: bytes) -> None:
    response = server.client.post("/v1/completions", content=content)
    assert response.status_code == 400
    assert len(response.content) < 500


@pytest.mark.parametrize("url", ["/etc/passwd", "file:///etc/passwd", "cat.png"])
def test_clients_cannot_name_files_of_the_server(server: Served, url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    body = {"model": "fake", "messages": [{"role": "user", "content": [part]}]}
    response = server.post(CHAT, body)
    assert response.status_code == 400
    assert "http, https or data URL" in error_of(response)["message"]


# ---------------------------------------------------------------- models


def test_models_are_the_base_and_the_adapters(server: Served, tmp_path: Path) -> None:
    write_adapter(tmp_path / "pirate")
    assert server.call(server.engine.load_lora_adapter("pirate", tmp_path / "pirate"))
    client = client_of(server)
    assert [(model.id, model.object) for model in client.models.list()] == [("fake", "model"), ("pirate", "model")]
    assert client.models.retrieve("pirate").id == "pirate"
    base, adapted, unnamed = (
        client.completions.create(model=name, prompt="Once", max_tokens=8, temperature=0)
        for name in ("fake", "pirate", "")
    )
    assert (base.model, adapted.model, unnamed.model) == ("fake", "pirate", "fake")
    assert base.choices[0].text == unnamed.choices[0].text != adapted.choices[0].text
    assert server.call(server.engine.unload_lora_adapter("pirate"))
    with pytest.raises(openai.NotFoundError, match="allowed: fake") as raised:
        client.completions.create(model="pirate", prompt="Once")
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


# ---------------------------------------------------------------- metrics


def test_metrics_count_the_requests_of_the_server(server: Served) -> None:
    path = "/v1/completions"

    def numbers() -> list[float]:
        """Return the number of ended requests, and the numbers of requests by status."""
        families = text_string_to_metric_families(server.client.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        by_status = {
            sample.labels["status"]: sample.value
            for sample in samples
            if sample.name == "aioengine_http_requests_total" and sample.labels["path"] == path
        }
        ended = sum(sample.value for sample in samples if sample.name == "aioengine_requests_total")
        return [ended, *(by_status.get(status, 0) for status in ("200", "400", "401"))]

    before = numbers()
    assert server.post(path, {"prompt": "Hi", "max_tokens": 2}).status_code == 200
    assert server.post(path, {"prompt": "Hi", "max_tokens": -2}).status_code == 400
    assert httpx.post(server.url + path).status_code == 401
    assert wait_until(lambda: numbers() == [count + 1 for count in before])
    assert httpx.get(f"{server.url}/metrics").status_code == 401


# ---------------------------------------------------------------- load and disconnects


def test_full_server_is_status_429_with_retry_after_and_not_ready(server: Served) -> None:
    server.call(server.engine.pause_generation("in_place"))
    body = LONG | {"stream": True}
    with (
        server.client.stream("POST", "/v1/completions", json=body),  # it runs
        server.client.stream("POST", "/v1/completions", json=body),  # it waits
    ):
        response = server.post("/v1/completions", LONG)
        ready = server.client.get("/ready")
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert error_of(response)["type"] == "rate_limit_error"
    assert (ready.status_code, ready.json()) == (503, {"state": "overloaded"})
    assert server.client.get("/health").status_code == 200
    server.call(server.engine.continue_generation())
    server.wait_until_idle()
    assert wait_until(lambda: server.client.get("/ready").status_code == 200)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_client_that_disconnects_aborts_its_request(server: Served, path: str, stream: bool) -> None:
    server.call(server.engine.pause_generation("in_place"))  # the answer has no end
    body = chat("Hi", stream=stream) if path == CHAT else LONG | {"stream": stream}
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nx-api-key: first\r\ncontent-length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
        client.sendall(head.encode() + content)
        assert wait_until(lambda: server.engine.stats()["num_streams"] == 1)
    assert wait_until(lambda: server.engine.stats()["num_streams"] == 0)
    server.call(server.engine.continue_generation())
    server.wait_until_idle()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_answer_that_the_server_ends_is_an_error(server: Served, path: str) -> None:
    body = chat("Hi", max_tokens=1000, ignore_eos=True) if path == CHAT else LONG
    server.call(server.engine.pause_generation("in_place"))
    with server.client.stream("POST", path, json=body | {"stream": True}) as response:
        server.engine.abort_request(abort_all=True)
        server.call(server.engine.continue_generation())
        lines = [line for line in response.iter_lines() if line]
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["type"] == "server_error"
    assert lines[-1] == "data: [DONE]"
    server.wait_until_idle()


# ---------------------------------------------------------------- resumed streams


def events(response: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the ids and data of the events of a stream."""
    event_id = ""
    for line in response.iter_lines():
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line.startswith("data: {"):
            yield event_id, json.loads(line.removeprefix("data: "))


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


def tokens_of(choice: dict[str, Any]) -> list[str]:
    logprobs = choice["logprobs"]
    return logprobs["tokens"] if "tokens" in logprobs else [entry["token"] for entry in logprobs["content"]]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_broken_stream_continues_after_the_last_event(server: Served, path: str) -> None:
    fields = {"max_tokens": 60, "ignore_eos": True, "seed": 3, "stream_options": {"include_usage": True}}
    body = chat("Hi", logprobs=True) if path == CHAT else {"prompt": "Hi", "logprobs": 0, "echo": True}
    body |= fields
    whole = server.post(path, body).json()
    expected = whole["choices"][0]
    text = expected["message"]["content"] if path == CHAT else expected["text"]
    body |= {"stream": True, "resume_ttl": 20}
    joined, tokens, last_id, chunk = "", [], "", {}
    for num_events in (1, 7, 20, 1000):
        headers = {"Last-Event-ID": last_id} if last_id else {}
        with server.client.stream("POST", path, json=body, headers=headers) as response:
            assert response.status_code == 200
            for event_id, chunk in islice(events(response), num_events):
                last_id = event_id
                for choice in chunk["choices"]:
                    joined += text_of(choice)
                    tokens += tokens_of(choice)
    assert joined == text
    assert tokens == tokens_of(expected)
    assert chunk["usage"]["completion_tokens"] == 60
    server.wait_until_idle()


async def test_continued_stream_starts_with_new_text() -> None:
    def chunk(text: str, offset: int, reason: str | None = None) -> dict[str, Any]:
        ids = {"output_ids": [*text.encode()], "token_offset": offset}
        return {"text": text, "text_offset": offset, "meta_info": {"finish_reason": reason}, **ids}

    async def stream() -> AsyncIterator[dict[str, Any]]:
        for part in (chunk("known", 0), chunk(" new", 5), chunk(".", 9, "stop")):
            yield part

    def write(_: str, index: int) -> Any:
        return lambda piece: {"index": index, "text": piece.text}

    choices = Choices("cmpl", "text", "text", "fake", {}, partial, write)
    stream_events = choices._events(
        cast("Any", stream()), StreamPosition("cmpl", "r", 5, 5), GenerateBody(resume_ttl=1.0)
    )
    sent = [event.decode() async for event in stream_events]
    assert [json.loads(event.partition("data: ")[2])["choices"][0]["text"] for event in sent[:-1]] == [" new", "."]


@pytest.mark.parametrize(
    ("position", "is_first"), [(StreamPosition("cmpl", "r"), True), (StreamPosition("cmpl", "r", 0, 1), False)]
)
async def test_continued_stream_does_not_repeat_the_prompt(position: StreamPosition, is_first: bool) -> None:
    """Also if the events before it had no text: their tokens may begin a stop string."""

    async def stream() -> AsyncIterator[dict[str, Any]]:
        for text, offset, reason in (("", 0, None), (" new", 1, "stop")):
            ids = {"output_ids": [5], "token_offset": offset}
            yield {"text": text, "text_offset": 0, "meta_info": {"finish_reason": reason}, **ids}

    are_first: list[bool] = []

    def write(_: str, index: int) -> Any:
        return lambda piece: are_first.append(piece.is_first) or {"index": index}

    choices = Choices("cmpl", "text", "text", "fake", {}, partial, write)
    async for _ in choices._events(cast("Any", stream()), position, GenerateBody(resume_ttl=1.0)):
        pass
    assert are_first == [is_first, False]


def test_event_id_beyond_the_end_of_the_stream_is_refused(server: Served) -> None:
    body = {"prompt": "Hi", "max_tokens": 9, "ignore_eos": True, "stream": True, "resume_ttl": 20}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        *_, (event_id, _) = [event for event in events(response) if event[0]]
    start, num_characters, num_tokens = event_id.rsplit(":", 2)
    beyond = f"{start}:{int(num_characters) + 1}:{num_tokens}"
    refused = server.post("/v1/completions", body, headers={"Last-Event-ID": beyond})
    assert refused.status_code == 400
    assert f"must be at most {num_characters}, the text so far" in error_of(refused)["message"]
    assert server.post("/v1/completions", body, headers={"Last-Event-ID": event_id}).status_code == 200
    server.wait_until_idle()


def test_event_id_with_too_many_tokens_loses_only_logprobs(server: Served) -> None:
    body = {"prompt": "Hi", "max_tokens": 9, "ignore_eos": True, "stream": True, "logprobs": 0, "resume_ttl": 20}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        choices_of_events = [(event_id, *chunk["choices"]) for event_id, chunk in events(response)]
    start, num_characters, _ = choices_of_events[0][0].rsplit(":", 2)
    headers = {"Last-Event-ID": f"{start}:{num_characters}:{10**9}"}
    with server.client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        rest = [choice for _, chunk in events(response) for choice in chunk["choices"]]
    assert "".join(map(text_of, rest)) == "".join(text_of(choice) for _, choice in choices_of_events[1:])
    assert rest[-1]["finish_reason"] == "length"
    assert [token for choice in rest for token in tokens_of(choice)] == []
    server.wait_until_idle()


def test_stream_that_another_request_continues_ends_with_an_error(server: Served) -> None:
    body = {"prompt": "Hi", "max_tokens": 1900, "ignore_eos": True, "stream": True, "resume_ttl": 20}
    stream = partial(server.client.stream, "POST", "/v1/completions", json=body)
    with stream() as response:
        first = events(response)
        event_id, _ = next(first)
        assert server.call(server.engine.pause_generation("in_place"))
        with stream(headers={"Last-Event-ID": event_id}) as continued:
            (*_, (_, last)) = first
            assert server.call(server.engine.continue_generation())
            (*_, (_, end)) = events(continued)
    assert "another request continues this stream" in last["error"]["message"]
    assert end["choices"][0]["finish_reason"] == "length"
    server.wait_until_idle()


def test_stream_without_logprobs_is_not_continued_with_them(server: Served) -> None:
    body = {"prompt": "Hi", "max_tokens": 9, "ignore_eos": True, "stream": True, "resume_ttl": 20}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        event_id, _ = next(events(response))
    response = server.post("/v1/completions", body | {"logprobs": 1}, headers={"Last-Event-ID": event_id})
    assert "this stream was started without logprobs" in response.text
    assert "invalid_request_error" in response.text
    server.wait_until_idle()


def test_stream_is_not_continued_at_another_endpoint(server: Served) -> None:
    for path, body, other in (
        ("/v1/completions", {"prompt": "Hi"}, CHAT),
        (CHAT, chat("Hi"), "/v1/completions"),
    ):
        fields = {"max_tokens": 9, "ignore_eos": True, "stream": True, "resume_ttl": 20}
        with server.client.stream("POST", path, json=body | fields) as response:
            event_id, _ = next(events(response))
        other_body = chat("Hi") if other == CHAT else {"prompt": "Hi"}
        refused = server.post(other, other_body | fields, headers={"Last-Event-ID": event_id})
        assert refused.status_code == 400
        assert "must be the id of an event of this endpoint" in error_of(refused)["message"]
        assert server.post(path, body | fields, headers={"Last-Event-ID": event_id}).status_code == 200
    server.wait_until_idle()


def test_slow_stop_regex_is_status_400(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "PUSH_BUDGET_S", 0.0)
    response = server.post("/v1/completions", {"prompt": "Hi", "stop_regex": "(a+)+b", "ignore_eos": True})
    assert response.status_code == 400
    assert "stop_regex took longer than" in error_of(response)["message"]


def test_context_length_limits_the_size_of_conversions() -> None:
    with served(fake_async_engine(context_length=32)) as server:
        bodies: tuple[tuple[str, str, Any, int, str], ...] = (
            ("/tokenize", "prompt", "x", 512, "the text has 513 characters; at most 512 are converted"),
            ("/detokenize", "tokens", [65], 32, "tokens has 33 ids; at most 32 are converted"),
        )
        for path, name, unit, limit, reason in bodies:
            assert server.post(path, {name: unit * limit}).status_code == 200
            refused = server.post(path, {name: unit * (limit + 1)})
            assert refused.status_code == 400
            assert reason in error_of(refused)["message"]


def test_tool_arguments_that_are_nested_too_deeply_stay_text(server: Served) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 5000 + "]" * 5000}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    response = server.post(CHAT, {"model": "fake", "messages": messages, "max_tokens": 1})
    assert response.status_code == 200


def test_nested_body_is_answered_or_refused_at_every_depth(server: Served) -> None:
    """A response repeats its tools, a few levels deeper than the body has them."""
    statuses: set[int] = set()
    for depth in range(900, 1000):
        tool = f'{{"type": "function", "name": "f", "parameters": {"[" * depth}{"]" * depth}}}'
        body = f'{{"input": "x", "max_output_tokens": 1, "tool_choice": "none", "tools": [{tool}]}}'
        statuses.add(server.client.post("/v1/responses", content=body).status_code)
    assert statuses <= {200, 400}


def test_bytes_of_logprobs_are_those_of_parts_of_a_character() -> None:
    with served(fake_async_engine(answers={"": "añ€"})) as server:
        body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "max_tokens": 9}
        (choice,) = server.post(CHAT, body).json()["choices"]
        entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).startswith("añ€".encode())
    assert entries[1]["token"] == "\ufffd"


def test_text_offsets_count_characters() -> None:
    text = "añ€"  # 1, 2 and 3 tokens
    body = {"prompt": text, "echo": True, "logprobs": 0, "max_tokens": 6}
    with served(fake_async_engine(answers={"": text})) as running:
        (choice,) = running.post("/v1/completions", body).json()["choices"]
        with running.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            streamed = [value["choices"][0]["logprobs"]["text_offset"] for _, value in events(response)]
    assert choice["text"] == text * 2
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 5]
    assert [offset for offsets in streamed for offset in offsets] == choice["logprobs"]["text_offset"]


@pytest.mark.parametrize("num_top", [-1, 21])
def test_number_of_top_logprobs_is_limited(server: Served, num_top: int) -> None:
    for path, fields in (
        (CHAT, chat("x", logprobs=True, top_logprobs=num_top)),
        ("/v1/completions", LONG | {"logprobs": num_top}),
    ):
        response = server.post(path, fields)
        assert response.status_code == 400
        assert f"0 to 20 top logprobs of a token, got {num_top}" in error_of(response)["message"]


def test_key_may_have_any_characters() -> None:
    with served(fake_async_engine(), api_key="sécret") as server:
        for key, status in (("sécret", 200), ("secret", 401)):
            headers = {"Authorization": f"Bearer {key}".encode()}
            assert server.client.get("/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize("event_id", ["nonsense", "x:1:y", "unknown:3:3", "x:-1:2"])
def test_unknown_event_id_is_status_400(server: Served, event_id: str) -> None:
    response = server.post(CHAT, chat("x", stream=True), headers={"Last-Event-ID": event_id})
    assert response.status_code == 400


def test_router_imports_only_public_names() -> None:
    public = ("aioengine.openai.", "aioengine.http.", "aioengine.errors.", "aioengine.parsing.", "aioengine.metrics.")
    targets = {entry.target for of in modules() if of.place.startswith("openai/") for entry in imports(of)}
    inner = {target for target in targets if target.startswith("aioengine.") and not f"{target}.".startswith(public)}
    assert {target.rpartition(".")[2] for target in inner} <= set(aioengine.__all__)
