"""The example servers stream, refuse requests if they are full, abort on disconnect, and drain on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.testclient import TestClient

from aioengine.testing.fake_engine import fake_async_engine
from aioengine.testing.faults import Faults
from tests.kit.source import ROOT
from tests.kit.waiting import until, wait_until

pytestmark = pytest.mark.process

SERVERS = ("fastapi_server.py", "aiohttp_server.py")
LONG = {"max_new_tokens": 1500, "ignore_eos": True, "temperature": 1.0, "sampling_seed": 1}
IDLE = ("num_running", "num_waiting", "num_streams", "num_detokenizing")


class Server:
    """An example server in its own process. One request runs, one waits, and more are refused."""

    def __init__(self, name: str, *start: str) -> None:
        """start: arguments of Python before the path of the example."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        flags = ["--port", str(self.port), "--max-running-requests", "1", "--max-queued-requests", "1"]
        command = [sys.executable, *start, str(ROOT / "examples" / name), *flags]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True
        )
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=30)

    def wait_until_healthy(self) -> None:
        def is_healthy() -> bool:
            assert self.process.poll() is None, self.output()
            with contextlib.suppress(httpx.TransportError):
                return self.client.get("/health").status_code == 200
            return False

        assert wait_until(is_healthy, 60, every_s=0.1)

    def addresses(self) -> set[str]:
        """Return the addresses on which it listens."""
        connections = psutil.Process(self.process.pid).net_connections("tcp")
        return {entry.laddr.ip for entry in connections if entry.status == psutil.CONN_LISTEN}

    def health(self) -> dict[str, Any]:
        health: dict[str, Any] = self.client.get("/health").json()
        return health

    def stats(self) -> dict[str, int]:
        stats: dict[str, int] = self.health()["stats"]
        return stats

    def wait_until_idle(self) -> None:
        assert wait_until(lambda: not any(self.stats()[name] for name in IDLE), every_s=0.01), self.stats()

    def output(self) -> str:
        return self.process.communicate(timeout=60)[0]

    def stop(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(request.param)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def ask(prompt: object, params: Mapping[str, object] | None = None) -> dict[str, object]:
    return {"prompt": prompt, "sampling_params": params}


def test_server_listens_only_on_this_machine(server: Server) -> None:
    assert server.addresses() == {"127.0.0.1"}


def test_server_streams(server: Server) -> None:
    params = {"temperature": 0, "max_new_tokens": 8}
    with server.client.stream("POST", "/generate", json=ask("The capital of France is", params)) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = list(events(response))
    assert "Paris" in "".join(chunk["text"] for chunk in chunks)
    assert [chunk["text_offset"] for chunk in chunks] == offsets(chunks)
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] in {"stop", "length"}
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])
    server.wait_until_idle()


def offsets(chunks: list[dict[str, Any]]) -> list[int]:
    return [sum(len(chunk["text"]) for chunk in chunks[:index]) for index in range(len(chunks))]


def test_the_first_chunk_arrives_long_before_the_last(server: Server) -> None:
    with server.client.stream("POST", "/generate", json=ask("Once upon a time", LONG)) as response:
        chunks = events(response)
        next(chunks)
        assert server.stats()["num_streams"] == 1
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (ask("x", {"temperature": 3}), "temperature"),
        (ask("x", {"nonsense": 3}), "nonsense"),
        (ask("word " * 100_000), "tokens"),
        ({}, "prompt"),
    ],
)
def test_bad_input_is_status_400_with_the_reason(server: Server, body: dict[str, object], word: str) -> None:
    response = server.client.post("/generate", json=body)
    assert response.status_code == 400
    assert word in response.text


def test_body_that_is_not_an_object_is_refused_with_the_reason(server: Server) -> None:
    response = server.client.post("/generate", json=[1])
    assert response.status_code == 400
    assert re.search("mapping|dictionary", response.text)


JSON = "application/json"
UNREADABLE: dict[str, tuple[bytes, dict[str, str]]] = {
    "not UTF-8": (b'{"prompt": "\xff"}', {}),
    "no JSON": (b'{"prompt": "x"} and more', {}),
    "nothing": (b"", {}),
    "NaN": (b"NaN", {}),
    "deep": (b"[" * 100_000 + b"]" * 100_000, {}),
    "deep in a parameter": (b'{"prompt": "x", "sampling_params": {"stop": ' + b"[" * 900 + b"]" * 900 + b"}}", {}),
    "a large number": (b'{"prompt": "x", "timeout": 1' + b"0" * 400 + b"}", {}),
    "an immense number": (b'{"prompt": "x", "timeout": 1' + b"0" * 9999 + b"}", {}),
    "a number for text": (b'{"prompt": 5}', {}),
    "half a character": (b'{"prompt": "\\ud800"}', {}),
    "many fields": (b"{" + b", ".join(b'"%d": 1' % i for i in range(9999)) + b"}", {}),
    "no event": (b'{"prompt": "x", "rid": "x"}', {"last-event-id": "9" * 5000}),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_unreadable_request_is_status_400_with_a_short_reason(server: Server, what: str) -> None:
    content, headers = UNREADABLE[what]
    response = server.client.post("/generate", content=content, headers={"content-type": JSON} | headers)
    assert response.status_code == 400
    assert len(response.content) < 1000
    assert server.health()["state"] == "running"


@pytest.mark.parametrize("charset", ["nosuch", "hex", "a b", "utf-16"])
def test_charset_of_the_client_is_ignored(server: Server, charset: str) -> None:
    headers = {"content-type": f'{JSON}; charset="{charset}"'}
    body = json.dumps(ask("Hi", {"max_new_tokens": 1})).encode()
    assert server.client.post("/generate", content=body, headers=headers).status_code == 200


def test_a_field_that_does_not_exist_is_refused_by_name(server: Server) -> None:
    response = server.client.post("/generate", json=ask("x") | {"tenant": "gold"})
    assert response.status_code == 400
    assert "tenant" in response.text


def test_client_that_disconnects_aborts_its_stream(server: Server) -> None:
    aborted = server.stats()["num_aborted"]
    with server.client.stream("POST", "/generate", json=ask("Once upon a time", LONG)) as response:
        next(events(response))
    server.wait_until_idle()
    stats = server.stats()
    assert stats["num_aborted"] == aborted + 1
    assert stats["num_free_pages"] == stats["num_pages"]


def test_client_that_disconnects_aborts_its_answer(server: Server) -> None:
    aborted = server.stats()["num_aborted"]
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(post(ask("Once upon a time", LONG) | {"stream": False}))
        assert wait_until(lambda: server.stats()["num_running"] == 1, every_s=0.01)
    server.wait_until_idle()
    assert server.stats()["num_aborted"] == aborted + 1


def test_whole_answer_is_one_json_object(server: Server) -> None:
    body = ask("The capital of France is", {"temperature": 0, "max_new_tokens": 8}) | {"stream": False}
    response = server.client.post("/generate", json=body)
    assert response.status_code == 200
    assert response.json()["text"].startswith(" Paris")


def post(body: dict[str, object]) -> bytes:
    """Return the bytes of a request, for tests that close the connection themselves."""
    content = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: {JSON}\r\ncontent-length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


async def test_fastapi_server_detects_a_disconnect_behind_a_middleware() -> None:
    engine = fake_async_engine()
    app = module("fastapi_server.py").make_app(engine, lambda: None)
    app.add_middleware(BaseHTTPMiddleware, dispatch=lambda request, call_next: call_next(request))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        await until(lambda: server.started)
        await engine.pause_generation("in_place")  # the answer has no end
        _, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(post(ask("Hi", LONG) | {"stream": False}))
        await until(lambda: engine.stats()["num_streams"] == 1)
        writer.close()
        await until(lambda: engine.stats()["num_streams"] == 0)
        server.should_exit = True
        await serving


@pytest.mark.parametrize("params", [{"ebnf": "x"}, {"regex": r"[^\s\S]"}])
def test_a_constraint_that_the_compiler_refuses_is_status_400(server: Server, params: dict[str, object]) -> None:
    response = server.client.post("/generate", json=ask("x", params))
    assert response.status_code == 400
    assert "cannot be enforced" in response.text


def test_clients_that_disconnect_at_any_moment_leave_nothing(server: Server) -> None:
    """Clients disconnect before, during and after the answer. Some are refused, because the server is full."""
    draw = random.Random(2)
    data = post(ask("Once upon a time", LONG | {"max_new_tokens": 30}))
    for _ in range(40):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(data if draw.random() < 0.9 else data[: draw.randrange(len(data))])
            time.sleep(draw.random() * 0.1)
    server.wait_until_idle()
    stats = server.stats()
    assert stats["num_free_pages"] == stats["num_pages"]
    assert server.client.post("/generate", json=ask("Hi", {"max_new_tokens": 2})).status_code == 200


def test_a_full_server_answers_503_with_retry_after(server: Server) -> None:
    body = ask("Once upon a time", LONG)
    with server.client.stream("POST", "/generate", json=body) as running:
        chunks = events(running)  # a dropped generator would close the connection
        next(chunks)
        with server.client.stream("POST", "/generate", json=body):
            response = server.client.post("/generate", json=body)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
    server.wait_until_idle()
    assert server.client.post("/generate", json=ask("Hi", {"max_new_tokens": 2})).status_code == 200


FAKE = """
import runpy, sys
import aioengine
from aioengine.testing.fake_engine import fake_async_engine
aioengine.AsyncEngine = lambda **_: fake_async_engine(processes=True, step_time_s=0.005, max_restarts=1)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs an example with a fake engine, which starts six times as fast."""


@pytest.mark.parametrize("name", SERVERS)
def test_sigterm_lets_open_streams_end(name: str) -> None:
    server = Server(name, "-c", FAKE)
    try:
        server.wait_until_healthy()
        with server.client.stream(
            "POST", "/generate", json=ask("Once upon a time", LONG | {"max_new_tokens": 300})
        ) as response:
            stream = events(response)
            next(stream)
            server.process.send_signal(signal.SIGTERM)
            assert wait_until(lambda: server.health()["state"] == "draining", every_s=0.01)
            refused = httpx.post(f"{server.url}/generate", json=ask("Hi"), timeout=20)
            chunks = list(stream)
        assert refused.status_code == 503
        assert "draining" in refused.text
        assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 300}
        server.client.close()
        output = server.output()
        assert "Traceback" not in output
        assert server.process.returncode == 0, output
    finally:
        server.stop()


@pytest.mark.parametrize("name", SERVERS)
def test_an_engine_that_dies_ends_the_server_with_an_error(name: str) -> None:
    server = Server(name, "-c", FAKE)
    try:
        server.wait_until_healthy()
        killed: set[int] = set()
        deadline = time.monotonic() + 100
        while server.process.poll() is None:  # the scheduler is replaced once
            assert time.monotonic() < deadline
            with contextlib.suppress(httpx.TransportError, ProcessLookupError):
                for process in server.health()["processes"]:
                    if process["role"] == "scheduler" and process["alive"] and process["pid"] not in killed:
                        killed.add(process["pid"])
                        os.kill(process["pid"], signal.SIGKILL)
            time.sleep(0.1)
        assert len(killed) == 2
        assert server.process.returncode == 1
    finally:
        server.stop()


def test_reconnecting_client_continues_after_the_last_event(server: Server) -> None:
    params: dict[str, object] = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    body = ask("Once upon a time", params)
    with server.client.stream("POST", "/generate", json=body) as response:
        whole = "".join(chunk["text"] for chunk in events(response))
    body |= {"rid": "mine", "resume_ttl": 20}
    text, last_id, next_id = "", None, ""
    for num_lines in (3, 12, 4, 10_000):
        headers = {} if last_id is None else {"Last-Event-ID": last_id}
        with server.client.stream("POST", "/generate", json=body, headers=headers) as response:
            assert response.status_code == 200
            for line in islice(response.iter_lines(), num_lines):
                if line.startswith("id: "):
                    next_id = line.removeprefix("id: ")
                elif line.startswith("data: "):
                    chunk, last_id = json.loads(line.removeprefix("data: ")), next_id
                    assert chunk["text_offset"] == len(text)
                    text += chunk["text"]
    assert text == whole
    body["rid"] = "another"
    assert server.client.post("/generate", json=body, headers={"Last-Event-ID": "3"}).status_code == 400
    server.wait_until_idle()


def module(name: str) -> Any:
    """Import an example server."""
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), ROOT / "examples" / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", SERVERS)
async def test_failing_stream_ends_with_an_error_event(name: str) -> None:
    async with fake_async_engine(faults=Faults(fail_row_at=3)) as engine:
        sent = [event async for event in module(name).events(engine.async_generate("a", LONG, stream=True))]
    assert [event.partition(":")[0] for event in sent] == ["id", "id", "event"]
    last = sent[-1].splitlines()
    assert last[0] == "event: error"
    assert "failed" in json.loads(last[1].removeprefix("data: "))["message"]


SEVERAL: list[dict[str, Any]] = [
    {"prompt": ["Hi", "Hello"]},
    {"prompt": ["Hi", "Hello"], "sampling_params": [{"max_new_tokens": 3}, None], "rid": ["a", "b"]},
    {"input_ids": [[70], [71, 72]], "rid": "c"},
    {"prompt": "Hi", "sampling_params": {"n": 2, "max_new_tokens": 3}},
]


@pytest.mark.parametrize("body", SEVERAL)
def test_several_answers_come_in_events_without_ids(server: Server, body: dict[str, Any]) -> None:
    response = server.client.post("/generate", json=body)
    assert response.status_code == 200
    lines = [line for line in response.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert {chunk["index"] for chunk in chunks if chunk["meta_info"]["finish_reason"]} == {0, 1}


def test_server_of_the_readme_streams_and_drains() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "FastAPI(" in block), names)
    wrong: list[dict[str, object]] = [
        {},
        {"prompt": ""},
        {"prompt": "Hi", "max_tokens": 5},
        ask("Hi", {"temprature": 1}),
        ask("Hi", {"temperature": 9}),
        ask("Hi " * 5000),
    ]
    question = ask("The capital of France is", {"temperature": 0})
    with TestClient(names["app"]) as client:
        assert client.post("/generate", json=question).json()["text"].startswith(" Paris.")
        response = client.post("/generate", json=question | {"stream": True})
        chunks = [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line]
        assert "".join(chunk["text"] for chunk in chunks).startswith(" Paris.")
        assert [client.post("/generate", json=body).status_code for body in wrong] == [400] * len(wrong)
    refused = TestClient(names["app"]).post("/generate", json=ask("Hi"))  # the engine was drained and shut down
    assert (refused.status_code, "shut down" in refused.text) == (503, True)
