"""The example for Ray Serve streams on while a node with a replica is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if find_spec("ray") is None:
    pytest.skip("needs the extra ray: pip install 'aioengine[ray]'", allow_module_level=True)
if find_spec("aiohttp_cors") is None:
    pytest.skip("needs the extra serve of ray: pip install 'ray[serve]'", allow_module_level=True)

from ray.util import placement_group_table

from tests.kit.source import ROOT
from tests.kit.waiting import wait_until
from tests.processes.ray_kit import add_node

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow]

BODY = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "stream": True, "ignore_eos": True}


async def stream(client: httpx.AsyncClient, begun: asyncio.Event) -> str:
    """Return the text of a stream. Set ``begun`` after its first chunk."""
    text = ""
    async with client.stream("POST", "/v1/completions", json=BODY) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                begun.set()
    return text


def is_waiting_for_a_node() -> bool:
    """Return whether the engine of the deployment waits for a place."""
    return "PENDING" in {group["state"] for group in placement_group_table().values()}


async def test_streams_continue_when_a_node_is_killed(cluster: Any, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = ["--port", port, "--device", "cpu", "--dp-size", "2", "--load-balance-method", "round_robin"]
    command = [sys.executable, str(ROOT / "examples" / "ray_serve.py"), *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": cluster.address}
    with (tmp_path / "log").open("w") as log:
        server = await asyncio.to_thread(subprocess.Popen, command, stdout=log, stderr=log, env=environment)
    try:
        # The deployment is on the first node, and one replica of the engine needs another node.
        assert await asyncio.to_thread(wait_until, is_waiting_for_a_node, 120, 0.2), (tmp_path / "log").read_text()
        second = add_node(cluster, 1)

        def is_ready() -> bool:
            assert server.poll() is None, (tmp_path / "log").read_text()
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
            return False

        assert await asyncio.to_thread(wait_until, is_ready, 180, 0.2), (tmp_path / "log").read_text()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            expected = await stream(client, asyncio.Event())
            assert len(expected) > 400
            events = [asyncio.Event() for _ in range(4)]
            streams = [asyncio.create_task(stream(client, event)) for event in events]
            for event in events:
                await event.wait()
            await asyncio.to_thread(cluster.remove_node, second, allow_graceful=False)
            assert [await text for text in streams] == [expected] * 4
            assert (await client.get("/ready")).status_code == 200
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
