"""Observers of the engine receive the trace of a client, but not its key."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aioengine import FinishedRequest
from aioengine.testing.fake_engine import fake_async_engine
from tests.kit.waiting import wait_until
from tests.openai_api.serving import Served, served

TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "Hi"},
}
finished: list[FinishedRequest] = []


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    engine = fake_async_engine()
    engine.add_observer(finished.append)
    with served(engine, api_key="secret") as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
def test_requests_belong_to_the_trace_of_the_client(server: Served, path: str) -> None:
    for trace in (TRACE, {}):
        finished.clear()
        response = server.post(path, BODIES[path], headers={"Authorization": "Bearer secret", **trace})
        assert response.status_code == 200, response.text
        assert wait_until(lambda: finished)
        assert {tuple(request.trace_headers.items()) for request in finished} == {tuple(trace.items())}
