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
from benchmarks.host.http import body_of, clients

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Any

NUM_TOKENS = 256
PROMPT_TOKENS = 128


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
    async with server(folder, arguments, options.port) as serving, clients(options.port, options.clients) as readers:
        await engine.start(folder, {name: value for name, value in arguments.items() if name != "load_format"})
        for turn in range(options.rounds + 1):
            for name in list(found)[:: -1 if turn % 2 else 1]:
                prompts = [ids(rng, PROMPT_TOKENS) for _ in range(options.streams)]
                started, before = time.monotonic(), serving.cpu_times()
                if name == "http":
                    streams = await readers.read([body_of(prompt, NUM_TOKENS) for prompt in prompts])
                else:
                    streams = await in_process(engine, prompts)
                of_run = figures(started, streams)
                if name == "http":
                    after = serving.cpu_times()
                    of_run["server CPU s"] = after.user + after.system - before.user - before.system
                for key, value in of_run.items():
                    if turn:
                        found[name].setdefault(key, []).append(value)
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
    options = parser.parse_args()
    uvloop.run(measure(options.folder or write_folder(options.models, "a"), options))


if __name__ == "__main__":
    main()
