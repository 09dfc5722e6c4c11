"""``aioengine bench``: a short measurement of one engine on this machine."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from msgspec import Struct

from aioengine.api import checks
from aioengine.api.engine import AsyncEngine
from aioengine.settings.config import EngineConfig

Figures = dict[str, float | int]

PERCENTILES = (50, 90, 99)
MAX_PROMPT_TOKENS = 2**26
"""Maximum tokens of all prompts together, which are generated before the measurement."""


class Workload(Struct, frozen=True, kw_only=True):
    """Requests with random prompts, ``concurrency`` of them at a time."""

    num_prompts: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int

    def __post_init__(self) -> None:
        checks.whole("--num-prompts", self.num_prompts, 1)
        checks.whole("--prompt-tokens", self.prompt_tokens, 1)
        checks.whole("--output-tokens", self.output_tokens, 2)
        checks.whole("--concurrency", self.concurrency, 1)
        total = self.num_prompts * self.prompt_tokens
        if total > MAX_PROMPT_TOKENS:
            raise ValueError(f"--num-prompts times --prompt-tokens is {total}; at most {MAX_PROMPT_TOKENS} works")


class Latency(Struct):
    """The seconds from sending a request to its first and last chunk."""

    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0


async def measure(workload: Workload, config: EngineConfig) -> Figures:
    """Run the workload once on a new engine. Return throughput (tokens per second) and latencies (milliseconds)."""
    started_at = time.monotonic()
    async with AsyncEngine.from_config(config) as engine:
        ready_at = time.monotonic()
        facts = await engine.get_model_info()
        vocab_size, context_length = facts["vocab_size"], facts["context_length"]
        if workload.prompt_tokens >= context_length:  # before generating the prompts, which may take minutes
            raise ValueError(f"the prompt has {workload.prompt_tokens} tokens, and the context {context_length}")
        await _run(engine, _prompt(vocab_size, 16, seed=-1), num_tokens=2)  # the first request is slower
        prompts = [_prompt(vocab_size, workload.prompt_tokens, seed=seed) for seed in range(workload.num_prompts)]
        begun_at = time.monotonic()
        latencies = await _run_all(engine, prompts, workload)
        wall_s = time.monotonic() - begun_at
    return {"start_s": round(ready_at - started_at, 3), **_figures(latencies, workload, wall_s)}


def _prompt(vocab_size: int, num_tokens: int, *, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(vocab_size) for _ in range(num_tokens)]


async def _run_all(engine: AsyncEngine, prompts: list[list[int]], workload: Workload) -> list[Latency]:
    latencies: list[Latency] = []

    async def work() -> None:
        while prompts:
            latencies.append(await _run(engine, prompts.pop(), num_tokens=workload.output_tokens))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(workload.concurrency, workload.num_prompts)):
                group.create_task(work())
    except ExceptionGroup as failures:  # all requests are alike, so all fail with the same error
        raise failures.exceptions[0] from None
    return latencies


async def _run(engine: AsyncEngine, prompt: list[int], *, num_tokens: int) -> Latency:
    latency, sent_at = Latency(), time.monotonic()
    params = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    async for chunk in engine.async_generate(input_ids=prompt, sampling_params=params, stream=True):
        latency.last_s = time.monotonic() - sent_at
        latency.first_s = latency.first_s or latency.last_s
        latency.num_tokens += len(chunk["output_ids"])
    return latency


def _figures(latencies: Sequence[Latency], workload: Workload, wall_s: float) -> Figures:
    num_output = sum(latency.num_tokens for latency in latencies)
    num_prompt = workload.prompt_tokens * workload.num_prompts
    first = [latency.first_s for latency in latencies]
    total = [latency.last_s for latency in latencies]
    per_token = [
        (latency.last_s - latency.first_s) / (latency.num_tokens - 1) for latency in latencies if latency.num_tokens > 1
    ]
    figures: Figures = {
        "num_requests": len(latencies),
        "concurrency": workload.concurrency,
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "wall_s": round(wall_s, 3),
        "requests_per_s": round(len(latencies) / wall_s, 2),
        "prompt_tokens_per_s": round(num_prompt / wall_s, 1),
        "output_tokens_per_s": round(num_output / wall_s, 1),
    }
    for name, seconds in (("first_token_ms", first), ("per_token_ms", per_token), ("request_ms", total)):
        for percent in PERCENTILES:
            figures[f"{name}_p{percent}"] = round(1000 * percentile(seconds, percent), 2)
    return figures


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that ``percent`` percent of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] if ordered else 0.0
