"""Invalid bodies never make the server fail. Each value of valid bodies is replaced by values of other types."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from aioengine.testing.fake_engine import fake_async_engine
from tests.openai_api.serving import Served, served

JUNK: list[object] = [5, "x", [5]]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT = [
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "warm"},
]
TEXT = {"type": "text", "text": "w"}
BLOCKS = [
    {"role": "user", "content": [TEXT]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "w"}]}],
    },
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "warm"},
]
LIMITS = {"max_tokens": 2, "n": 1, "stop": ["x"], "seed": 1, "logit_bias": {"65": 1}, "timeout": 5}
NAMED = {"type": "function", "function": {"name": "f"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": LIMITS
    | {"messages": CHAT, "tools": [TOOL], "tool_choice": "none", "chat_template_kwargs": {"x": 1}}
    | {"stream_options": {"include_usage": True}, "response_format": {"type": "text"}, "logprobs": True},
    "/v1/chat/completions?tools": {"max_tokens": 2, "messages": CHAT, "tools": [TOOL], "tool_choice": NAMED},
    "/v1/completions": LIMITS | {"prompt": [[65, 66]], "echo": True, "logprobs": 1, "structured_outputs": {}},
    "/v1/messages": {
        "max_tokens": 2,
        "messages": BLOCKS,
        "system": [{"type": "text", "text": "x"}],
        "thinking": {"type": "x"},
    }
    | {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "none"}},
    "/v1/responses": {"max_output_tokens": 2, "input": ITEMS, "text": {"format": {"type": "text"}}}
    | {"tools": [{"type": "function", "name": "f"}], "tool_choice": "none", "reasoning": {"effort": "low"}},
    "/v1/embeddings": {"input": ["x"], "dimensions": 2},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/v1/score": {"query": "x", "items": ["y"], "label_token_ids": [65]},
    "/tokenize": {"messages": CHAT, "tools": [TOOL]},
    "/detokenize": {"tokens": [65]},
}


def paths_in(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the paths of all values in a body."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield (*path, key)
        yield from paths_in(entry, (*path, key))


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(fake_async_engine(), tool_parser="hermes", reasoning_parser="think") as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
def test_junk_in_a_body_is_never_an_error_of_the_server(server: Served, path: str) -> None:
    body = BODIES[path]
    if path.endswith("?tools"):
        assert "grammars" in server.post(path, body).text, "only the fake model refuses it"
    elif path not in ("/v1/rerank", "/v1/embeddings"):
        assert server.post(path, body).status_code == 200
    for place in paths_in(body):
        for junk in JUNK:
            changed = copy.deepcopy(body)
            inner: Any = changed
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = junk
            response = server.post(path, changed)
            assert response.status_code < 500, (place, junk, response.text)
            assert response.status_code == 200 or len(response.content) < 1000, (place, junk)
    server.wait_until_idle()
