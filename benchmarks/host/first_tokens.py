"""Starts of streams without a model: what one costs, and how soon many that start together have their first tokens.

    python -m benchmarks.host.first_tokens [--streams 256] [--repeats 5] [--json]

Real processes with a fake runner whose steps take 12 ms each and up to 8,192 tokens, about what a GPU takes for a small
model. Streams are started in one round of an event loop, from 128 token ids or as many bytes of text each; what a start
costs is CPU time of that round. Then one long prompt has the engine to itself: what its first token takes beside the
step. The fake runner's own work is in all times to first tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import uvloop

from aioengine.api.engine import AsyncEngine
from aioengine.testing.fake_engine import FakeSetup

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioengine.api.stream import Stream

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 8
LONG_TOKENS = 8000
STEP_S = 0.012

Figures = dict[str, list[float]]


def engine(streams: int) -> AsyncEngine:
    """Return an engine in which all requests fit at once."""
    setup = FakeSetup(
        step_time_s=STEP_S,
        processes=True,
        context_length=8192,
        num_pages=1024 + 16 * streams,
        max_running=streams,
        chunk_tokens=8192,
    )
    return AsyncEngine.from_blueprint(setup.blueprint)


def ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(97, 123) for _ in range(count)]


async def first_token(open_stream: Callable[[], Stream], started: float, firsts: list[float]) -> None:
    """Read a stream and note when its first chunk came."""
    waits = True
    async for _ in open_stream():
        if waits:
            firsts.append(time.perf_counter() - started)
            waits = False


async def together(
    running: AsyncEngine, prompts: list[list[int]], kind: str, params: dict[str, object], figures: Figures
) -> None:
    """Start a stream for each prompt in one round of the loop."""

    def open_stream(prompt: list[int]) -> Stream:
        if kind == "ids":
            return running.async_generate(input_ids=prompt, sampling_params=params, stream=True)
        return running.async_generate(bytes(prompt).decode(), params, stream=True)

    firsts: list[float] = []
    started = time.perf_counter()
    readers = [
        asyncio.create_task(first_token(lambda prompt=prompt: open_stream(prompt), started, firsts))
        for prompt in prompts
    ]
    cpu = time.process_time()
    await asyncio.sleep(0)
    figures[f"{kind}: CPU us for a start"].append((time.process_time() - cpu) / len(prompts) * 1e6)
    await asyncio.gather(*readers)
    firsts.sort()
    figures[f"{kind}: TTFT p50 ms"].append(firsts[len(firsts) // 2] * 1000)
    figures[f"{kind}: TTFT p99 ms"].append(firsts[len(firsts) * 99 // 100] * 1000)


async def alone(running: AsyncEngine, prompt: list[int], figures: Figures) -> None:
    """Measure the time of the first token of a long prompt without the step."""
    await asyncio.sleep(0.05)
    started = time.perf_counter()
    await running.async_generate(input_ids=prompt, sampling_params={"max_new_tokens": 1})
    figures[f"{LONG_TOKENS} ids alone: ms beside the step"].append((time.perf_counter() - started - STEP_S) * 1000)


async def measure(streams: int, repeats: int) -> Figures:
    draw = random.Random(1)
    params: dict[str, object] = {"max_new_tokens": OUTPUT_TOKENS, "temperature": 0.6, "ignore_eos": True}
    figures: Figures = defaultdict(list)
    async with engine(streams) as running:
        for number in range(repeats + 1):
            for kind in ("ids", "text"):
                await running.flush_cache()
                await together(running, [ids(draw, PROMPT_TOKENS) for _ in range(streams)], kind, params, figures)
            await running.flush_cache()
            await alone(running, ids(draw, LONG_TOKENS), figures)
            if number == 0:
                figures.clear()  # the warm-up
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    arguments = parser.parse_args()
    figures = uvloop.run(measure(arguments.streams, arguments.repeats))
    found = {what: (statistics.median(values), min(values), max(values)) for what, values in figures.items()}
    if arguments.json:
        print(
            json.dumps({what: dict(zip(("median", "min", "max"), three, strict=True)) for what, three in found.items()})
        )
        return
    print(f"{arguments.streams} streams:                  median     min     max")
    for what, three in found.items():
        print(f"{what:34}" + "".join(f"{value:8.2f}" for value in three))


if __name__ == "__main__":
    main()
