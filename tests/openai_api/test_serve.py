"""``aioengine serve`` answers probes while it starts, drains on SIGTERM, and prints errors as one line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from aioengine.cli import main
from tests.kit.source import ROOT
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.process

COMMAND = [sys.executable, "-m", "aioengine", "serve"]
LONG = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def running(*flags: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    port = free_port()
    process = subprocess.Popen(
        [*COMMAND, "--port", str(port), *flags],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield process, client
    finally:
        process.kill()
        process.communicate(timeout=60)


def state(client: httpx.Client, path: str) -> tuple[int, str]:
    with contextlib.suppress(httpx.TransportError):
        response = client.get(path)
        return response.status_code, response.json()["state"]
    return 0, "not reached"


def test_server_starts_streams_and_drains() -> None:
    with running("--served-model-name", "mine", AIOENGINE_API_KEY="secret") as (process, client):
        assert wait_until(lambda: state(client, "/ready")[0], every_s=0.02)
        assert state(client, "/ready") == (503, "starting")
        assert state(client, "/health") == (200, "starting")
        response = client.post("/v1/completions", json=LONG, headers={"Authorization": "Bearer secret"})
        assert (response.status_code, "is being loaded" in response.text) == (503, True)
        assert wait_until(lambda: state(client, "/ready") == (200, "running"), 60, every_s=0.1)
        assert client.get("/v1/models").status_code == 401
        client.headers["Authorization"] = "Bearer secret"
        assert client.get("/v1/models").json()["data"][0]["id"] == "mine"
        for method, path, status in (("POST", "/completions", 404), ("GET", "/v1/completions", 405)):
            refused = client.request(method, path)
            message = refused.json()["error"]["message"]
            assert (refused.status_code, f"there is no {method} {path}" in message) == (status, True)
            assert ("base URL" in message) == (path == "/completions")
        with client.stream("POST", "/v1/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert wait_until(lambda: state(client, "/ready") == (503, "draining"), every_s=0.01)
            assert client.post("/v1/completions", json=LONG).status_code == 503
            last = [line for line in lines if line.startswith("data: {")][-1]
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        client.close()
        output = process.communicate(timeout=60)[0]
        assert process.returncode == 0
        assert output.splitlines() == [f"serving at {str(client.base_url).rstrip('/')}/v1"]


@pytest.mark.slow
def test_second_interrupt_ends_the_server_at_once_without_a_traceback() -> None:
    with running() as (process, client):
        assert wait_until(lambda: state(client, "/ready") == (200, "running"), 60, every_s=0.1)
        with client.stream("POST", "/v1/completions", json=LONG | {"max_tokens": 2000}) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            assert wait_until(lambda: state(client, "/ready") == (0, "not reached"), every_s=0.01)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(httpx.TransportError):
                list(lines)
        output = process.communicate(timeout=60)[0]
        assert process.returncode == 130
        assert output.splitlines() == [f"serving at {str(client.base_url).rstrip('/')}/v1"]


@pytest.mark.parametrize(
    ("flags", "status", "reason"),
    [
        (["--port", "70000"], 2, "--port must be"),
        (["/nosuch"], 1, "no such folder"),
        (["demo", "--model", "demo"], 2, "given twice"),
    ],
)
def test_failed_start_of_the_server_has_an_error_of_one_line(
    flags: list[str], status: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags]) == status
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n"), reason in printed.err) == ("", 1, True)


def test_failed_download_ends_the_server_with_an_error_of_one_line() -> None:
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [*COMMAND, "no/such-model", "--port", "0"]
    done = subprocess.run(command, cwd=ROOT, env=offline, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert (done.stderr.count("\n"), "no/such-model" in done.stderr) == (1, True)
