"""Streams over HTTP without a model: CPU time of the process that serves, for each request and for each chunk.

    python -m benchmarks.host.http [--streams 256] [--output 64] [--rounds 5] [--profile 30]

The same streams of a fake engine are read in three ways, in turns: by this program, through the app with ASGI messages
that go nowhere, and over HTTP by other processes. Steps are far enough apart that most chunks have one token. The cost
of a request is measured with streams of one token. Medians with minimum and maximum.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import socket
import statistics
import sys
import time
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop
from fastapi import FastAPI

from aioengine.openai import openai_router
from aioengine.openai.router import app_of
from benchmarks.host.streams import engine, prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, MutableMapping, Sequence

    from starlette.types import ASGIApp

    from aioengine.api.engine import AsyncEngine

PATH = "/v1/completions"
STEP_S = 0.06
NUM_CLIENTS = 2


def body_of(token_ids: Sequence[int], num_tokens: int) -> dict[str, Any]:
    """Return the body of a stream with ``num_tokens`` tokens."""
    return {
        "model": "model",
        "prompt": list(token_ids),
        "max_tokens": num_tokens,
        "temperature": 0.6,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


# ---------------------------------------------------------------- clients


async def read_events(port: int, body: dict[str, Any]) -> list[float]:
    """Ask for one stream, and return the arrivals of its events with text."""
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content)
    arrivals: list[float] = []
    last = b""
    async for line in reader:
        if line.startswith(b"data: {"):
            arrivals.append(time.monotonic())
            last = line
    writer.close()
    usage = json.loads(last[6:])["usage"]
    if usage["completion_tokens"] != body["max_tokens"]:
        raise RuntimeError(f"a stream of {usage} tokens instead of {body['max_tokens']}")
    return arrivals[:-1]


async def _client(port: int) -> None:
    """Read the streams of each line of standard input, and print the arrivals of each stream."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        streams = await asyncio.gather(*(read_events(port, body) for body in json.loads(line)))
        print(json.dumps(streams), flush=True)


class Clients:
    """Processes that read streams."""

    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    async def read(self, bodies: list[dict[str, Any]]) -> list[list[float]]:
        """Ask for all streams together, and return the arrivals of the events of each."""
        number = len(self._processes)
        shares = [bodies[start::number] for start in range(number)]
        found = await asyncio.gather(*map(self._ask, self._processes, shares))
        return [stream for streams in found for stream in streams]

    @staticmethod
    async def _ask(process: asyncio.subprocess.Process, bodies: list[dict[str, Any]]) -> list[list[float]]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(bodies).encode() + b"\n")
        streams: list[list[float]] = json.loads(await process.stdout.readline())
        return streams


@asynccontextmanager
async def clients(port: int, number: int) -> AsyncIterator[Clients]:
    """Start processes that read streams of a port."""
    command = [sys.executable, "-m", "benchmarks.host.http", "--client", str(port)]
    pipe = asyncio.subprocess.PIPE
    processes = [
        await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 30) for _ in range(number)
    ]
    try:
        yield Clients(processes)
    finally:
        for process in processes:
            process.terminate()
            await process.wait()


# ---------------------------------------------------------------- three ways to read


async def in_process(running: AsyncEngine, body: dict[str, Any]) -> int:
    """Return the number of chunks."""
    params = {"max_new_tokens": body["max_tokens"], "temperature": 0.6, "ignore_eos": True}
    num_chunks = 0
    async for _ in running.async_generate(input_ids=body["prompt"], sampling_params=params, stream=True):
        num_chunks += 1
    return num_chunks


async def through_app(app: ASGIApp, body: dict[str, Any]) -> int:
    """Return the number of events."""
    content, num_messages = json.dumps(body).encode(), 0
    messages = iter([{"type": "http.request", "body": content, "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        return await asyncio.get_running_loop().create_future()

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal num_messages
        num_messages += message["type"] == "http.response.body"

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": PATH,
        "raw_path": PATH.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
    }
    await app(scope, receive, send)
    return num_messages - 3  # usage, [DONE], the end


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[int]:
    """Serve the app on this loop, and return the port."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
    with closing(socket.create_server(("127.0.0.1", 0), backlog=2048)) as listening:
        task = asyncio.create_task(server.serve(sockets=[listening]))
        yield listening.getsockname()[1]
        server.should_exit = True
        await task


async def measure(options: argparse.Namespace) -> None:
    costs: dict[str, dict[str, list[float]]] = {}
    profile = cProfile.Profile()
    async with engine(options.streams, options.output, STEP_S) as running:
        router = openai_router(running, served_model_name="model")
        app, fastapi = app_of(router), FastAPI()
        fastapi.include_router(router)
        async with served(app) as port, clients(port, NUM_CLIENTS) as readers:

            async def read(way: str, num_tokens: int) -> tuple[float, int]:
                """Return the CPU seconds of this process, and the number of chunks."""
                bodies = [body_of(prompt(number), num_tokens) for number in range(options.streams)]
                before = time.process_time()
                if way == "http":
                    chunks = [len(stream) for stream in await readers.read(bodies)]
                elif way in ("app", "fastapi"):
                    through = fastapi if way == "fastapi" else app
                    chunks = await asyncio.gather(*(through_app(through, body) for body in bodies))
                else:
                    chunks = await asyncio.gather(*(in_process(running, body) for body in bodies))
                return time.process_time() - before, sum(chunks)

            for turn in range(options.rounds + 1):
                for way in ("engine", "app", "fastapi", "http")[:: -1 if turn % 2 else 1]:
                    request_s, _ = await read(way, 1)
                    is_profiled = options.profile and turn == options.rounds and way == "http"
                    if is_profiled:
                        profile.enable()
                    stream_s, num_chunks = await read(way, options.output)
                    if is_profiled:
                        profile.disable()
                    if turn:
                        of_way = costs.setdefault(way, {})
                        of_way.setdefault("us per request", []).append(request_s / options.streams * 1e6)
                        chunk_s = (stream_s - request_s) / (num_chunks - options.streams)
                        of_way.setdefault("us per chunk", []).append(chunk_s * 1e6)
                        of_way.setdefault("tokens per chunk", []).append(options.streams * options.output / num_chunks)
    for way, of_way in costs.items():
        for name, values in of_way.items():
            spread = f"({min(values):.1f} to {max(values):.1f})"
            print(f"{way:8} {name:18} {statistics.median(values):8.1f} {spread}")
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(options.profile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--output", type=int, default=64, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one that warms up")
    parser.add_argument("--profile", type=int, default=0, help="functions of a profile of the last streams over HTTP")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    uvloop.run(measure(options) if options.client is None else _client(options.client))


if __name__ == "__main__":
    main()
