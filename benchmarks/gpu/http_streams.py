"""Streams over HTTP, from ``aioengine serve``, and the same streams of an engine in this process, in turns on one GPU.

    python -m benchmarks.gpu.http_streams --models /tmp/bench-models [--streams 256] [--rounds 5] [--clients 4]
    python -m benchmarks.gpu.http_streams --folder FOLDER --streams 8 --arguments '{"device": "cpu"}'

Each stream has 128 tokens in and 256 out (W4). The clients are processes of their own: they read the events of
``/v1/completions`` and note when each arrives. The first round does not count. Medians with minimum and maximum: tokens
and chunks per second, first tokens, times between chunks, and the CPU seconds of the server's first process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import uvloop

from benchmarks.gpu.engines import AioEngine, Output
from benchmarks.gpu.models import write_folder
from benchmarks.gpu.workloads import ids, percentile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Any

NUM_TOKENS = 256
PROMPT_TOKENS = 128


async def read_events(port: int, prompt: list[int]) -> list[float]:
    """Ask for one stream and return when each of its events with text came."""
    body = {
        "model": "model",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0.6,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content)
    arrivals: list[float] = []
    last = b""
    async for line in reader:
        if line.startswith(b"data: {"):
            arrivals.append(time.monotonic())
            last = line
    writer.close()
    usage = json.loads(last[6:])["usage"]
    if usage["completion_tokens"] != NUM_TOKENS:
        raise RuntimeError(f"a stream of {usage} tokens instead of {NUM_TOKENS}")
    return arrivals[:-1]


async def client(port: int) -> None:
    """Run the rounds that standard input asks for: a line has the prompts, the answer the arrivals of each stream."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        streams = await asyncio.gather(*(read_events(port, prompt) for prompt in json.loads(line)))
        print(json.dumps(streams), flush=True)


async def over_http(clients: list[asyncio.subprocess.Process], prompts: list[list[int]]) -> list[list[float]]:
    async def ask(process: asyncio.subprocess.Process, share: list[list[int]]) -> list[list[float]]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(share).encode() + b"\n")
        found: list[list[float]] = json.loads(await process.stdout.readline())
        return found

    shares = [prompts[number :: len(clients)] for number in range(len(clients))]
    found = await asyncio.gather(*(ask(process, share) for process, share in zip(clients, shares, strict=True)))
    return [stream for streams in found for stream in streams]


async def in_process(engine: AioEngine, prompts: list[list[int]]) -> list[list[float]]:
    async def read(prompt: list[int]) -> list[float]:
        return [time.monotonic() async for _ in engine.stream(prompt, Output(NUM_TOKENS))]

    return await asyncio.gather(*(read(prompt) for prompt in prompts))


def figures(started: float, streams: list[list[float]]) -> dict[str, float]:
    seconds = max(stream[-1] for stream in streams) - started
    firsts = [stream[0] - started for stream in streams]
    gaps = [after - before for stream in streams for before, after in itertools.pairwise(stream)]
    return {
        "tok/s": len(streams) * NUM_TOKENS / seconds,
        "chunks/s": sum(map(len, streams)) / seconds,
        "first token p50 ms": percentile(firsts, 0.5) * 1000,
        "first token p99 ms": percentile(firsts, 0.99) * 1000,
        "gap p50 ms": percentile(gaps, 0.5) * 1000,
        "gap p99 ms": percentile(gaps, 0.99) * 1000,
    }


@asynccontextmanager
async def server(folder: Path, arguments: dict[str, Any], port: int) -> AsyncIterator[psutil.Process]:
    flags = [text for name, value in arguments.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "aioengine", "serve", str(folder), "--port", str(port), *flags]
    process = await asyncio.create_subprocess_exec(*command, "--served-model-name", "model")
    try:
        async with httpx.AsyncClient() as http:
            while True:
                try:
                    if (await http.get(f"http://127.0.0.1:{port}/ready")).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                if process.returncode is not None:
                    raise RuntimeError(f"the server ended with status {process.returncode}")
                await asyncio.sleep(0.2)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        await process.wait()


async def measure(folder: Path, options: argparse.Namespace) -> None:
    arguments: dict[str, Any] = {"load_format": "dummy", "max_total_tokens": options.streams * 448, **options.arguments}
    engine, rng = AioEngine(), random.Random(7)
    found: dict[str, dict[str, list[float]]] = {"engine": {}, "http": {}}
    async with server(folder, arguments, options.port) as serving:
        await engine.start(folder, {name: value for name, value in arguments.items() if name != "load_format"})
        command = [sys.executable, "-m", "benchmarks.gpu.http_streams", "--port", str(options.port), "--client"]
        pipe = asyncio.subprocess.PIPE
        clients = [
            await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 30)
            for _ in range(options.clients)
        ]
        for turn in range(options.rounds + 1):
            for name in list(found)[:: -1 if turn % 2 else 1]:
                prompts = [ids(rng, PROMPT_TOKENS) for _ in range(options.streams)]
                started, before = time.monotonic(), serving.cpu_times()
                if name == "http":
                    streams = await over_http(clients, prompts)
                else:
                    streams = await in_process(engine, prompts)
                of_run = figures(started, streams)
                if name == "http":
                    after = serving.cpu_times()
                    of_run["server CPU s"] = after.user + after.system - before.user - before.system
                for key, value in of_run.items():
                    if turn:
                        found[name].setdefault(key, []).append(value)
        for each in clients:
            each.terminate()
        await engine.close()
    for name, by_key in found.items():
        for key, values in by_key.items():
            spread = f"({min(values):.2f} to {max(values):.2f})"
            ratio = statistics.median(values) / statistics.median(found["engine"].get(key, values))
            print(f"{name:8} {key:20} {statistics.median(values):12.2f} {spread:26} ratio {ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("/tmp/bench-models"), help="folder for the model folder")
    parser.add_argument("--folder", type=Path, help="a model folder instead of one of the shape of Qwen3-0.6B")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5, help="that count, behind one that warms up")
    parser.add_argument("--clients", type=int, default=4, help="processes that read")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--arguments", type=json.loads, default={}, help="of both engines, as JSON")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        uvloop.run(client(options.port))
    else:
        uvloop.run(measure(options.folder or write_folder(options.models, "a"), options))


if __name__ == "__main__":
    main()
