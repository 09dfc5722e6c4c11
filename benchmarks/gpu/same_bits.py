"""Mixed requests in deterministic mode, each compared in bits with its answer alone. Random weights, bf16.

    python -m benchmarks.gpu.same_bits --models /tmp/bench-models --model a
    python -m benchmarks.gpu.same_bits --models /tmp/bench-models --model images --rounds 4
    python -m benchmarks.gpu.same_bits --folder MODEL

The requests differ in prompt, sampling, schema, adapter (models a and b) and image (model images: Qwen2.5-VL-7B); half
of the prompts share a prefix. First each is asked alone, with an empty prefix cache. Then all are asked together in
each round, in another order, half of them as streams. The KV pool is too small for them, so some are preempted. Of
eight rounds, the scheduler is killed in one, and the detokenizer in another one. Text, token ids, logprobs and
finish reason have to be equal. The exit status is 1 if one differs, or if nothing was reused, preempted or killed.

``--folder``: another model folder with weights, on any device, without adapters and images.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from aioengine import AsyncEngine
from benchmarks.gpu.adapters import write_adapters
from benchmarks.gpu.images import about_image, image_of, write_vision_folder
from benchmarks.gpu.models import write_folder
from benchmarks.schemas import list_schema, record_schema

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 50, "min_p": 0.01},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 0.9, "repetition_penalty": 1.3},
    {"temperature": 0.9, "frequency_penalty": 0.6, "presence_penalty": 0.3},
]
Request = dict[str, Any]


class Answer(NamedTuple):
    text: str
    ids: list[int]
    logprobs: object
    finish_reason: object


def make_request(number: int, adapters: list[Path], images: list[bytes]) -> Request:
    draw = random.Random(number)
    prompt = [draw.randrange(100, 3000) for _ in range(draw.choice([1, 17, 100, 300, 700]))]
    if number % 2:
        shared = random.Random(f"prefix {number % 6}")
        prompt = [shared.randrange(100, 3000) for _ in range(800)] + prompt
    sampling = {**draw.choice(SAMPLINGS), "max_new_tokens": draw.choice([8, 24, 64, 120])}
    sampling |= {"seed": number, "ignore_eos": True}
    if number % 5 == 0 and not images:
        sampling |= {"json_schema": draw.choice([list_schema, record_schema])(number % 40), "ignore_eos": False}
    request: Request = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": number % 3 == 0}
    if adapters and number % 4 < 2:
        request["lora_path"] = str(adapters[draw.randrange(len(adapters))])
    if images and number % 4 < 2:
        which = draw.randrange(len(images))
        request |= {"input_ids": prompt[:100] + about_image(number), "image_data": images[which]}
    return request


async def ask(engine: AsyncEngine, request: Request, *, as_stream: bool, counts: Counter[str]) -> Answer:
    """Add cached tokens and preemptions of the answer to ``counts``."""
    text, ids, logprobs = "", list[int](), list[object]()
    if as_stream:
        async for chunk in engine.async_generate(**request, stream=True):
            text, ids, meta = text + chunk["text"], ids + chunk["output_ids"], chunk["meta_info"]
            logprobs += meta.get("output_token_logprobs", [])
    else:
        answer: Any = await engine.async_generate(**request)
        text, ids, meta = answer["text"], answer["output_ids"], answer["meta_info"]
        logprobs += meta.get("output_token_logprobs", [])
    counts.update({name: meta[name] for name in ("cached_tokens", "num_preemptions")})
    return Answer(text, ids, logprobs, meta["finish_reason"])


async def kill(engine: AsyncEngine, role: str, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    [pid] = [one["pid"] for one in engine.health()["processes"] if one["role"] == role]
    os.kill(pid, signal.SIGKILL)


async def compare(engine: AsyncEngine, requests: list[Request], num_rounds: int) -> bool:
    started = time.perf_counter()
    alone: list[Answer] = []
    for request in requests:
        assert await engine.flush_cache()
        alone.append(await ask(engine, request, as_stream=False, counts=Counter()))
    print(f"{len(requests)} answers alone in {time.perf_counter() - started:.0f} s", flush=True)
    num_different, counts = 0, Counter[str]()
    duration_s = 0.0
    for number in range(num_rounds):
        order = list(range(len(requests)))
        random.Random(number).shuffle(order)
        role = {1: "scheduler", 3: "detokenizer"}.get(number % 8)
        killer = asyncio.create_task(kill(engine, role, duration_s / 2)) if role else None
        started = time.perf_counter()
        asked = [ask(engine, requests[i], as_stream=(i + number) % 2 > 0, counts=counts) for i in order]
        answers = await asyncio.gather(*asked)
        if killer:
            await killer
        else:
            duration_s = time.perf_counter() - started
        different = [i for i, answer in zip(order, answers, strict=True) if answer != alone[i]]
        num_different += len(different)
        print(f"round {number}: {len(different)} of {len(order)} differ", flush=True)
        for i in different[:3]:
            print(f"request {i}: {requests[i]['sampling_params']}", file=sys.stderr)
    counts["num_restarts"] = engine.stats()["num_restarts"]
    print(f"{num_rounds * len(requests)} answers together, {num_different} differ; {dict(counts)}", flush=True)
    return not num_different and all(counts.values())


async def main(options: argparse.Namespace) -> bool:
    adapters: list[Path] = []
    images: list[bytes] = []
    arguments: dict[str, Any] = {"load_format": "dummy"}
    if options.folder:
        folder, arguments = options.folder, {}
    elif options.model == "images":
        folder, images = write_vision_folder(options.models), [image_of(seed) for seed in range(8)]
        arguments["skip_tokenizer_init"] = True
    else:
        folder = write_folder(options.models, options.model)
        adapters = write_adapters(options.models, options.model)
        arguments |= {"enable_lora": True, "lora_paths": {str(path): str(path) for path in adapters}}
    requests = [make_request(number, adapters, images) for number in range(options.requests)]
    async with AsyncEngine(
        str(folder),
        enable_deterministic_inference=True,
        context_length=2048,
        max_total_tokens=options.pool_tokens,
        max_restarts=options.rounds,
        **arguments,
    ) as engine:
        return await compare(engine, requests, options.rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("/tmp/bench-models"), help="for configs and adapters")
    parser.add_argument("--model", choices=["a", "b", "images"], default="a")
    parser.add_argument("--folder", type=Path, help="of a model with weights, in place of --model")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pool-tokens", type=int, default=15_000)
    sys.exit(not asyncio.run(main(parser.parse_args())))
