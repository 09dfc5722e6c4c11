"""F2, structured output on a GPU: the shape of Qwen3-0.6B with random weights, 256 streams of 128 in and 256 out.

    python -m benchmarks.gpu.structured_output --models /tmp/bench-models
    python -m benchmarks.gpu.structured_output --models /tmp/bench-models --streams 64 --repeat 5

Tokens a second without a schema, with one list schema, with 32, and with 32 hard ones that the engine has not seen; the
same without a schema where each answer has the length of one of a hard schema, many of which end before the others; how
many of the answers that ended are valid; tokens a second of one request alone without a schema and with schemas that
force most of the tokens; and the time of its first token without a schema, with a fresh record and a fresh hard one.
``--folder``: another model folder, on any device.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema

from aioengine import AsyncEngine
from benchmarks.gpu.models import write_folder
from benchmarks.schemas import hard_schema, list_schema, named_schema, record_schema

if TYPE_CHECKING:
    from collections.abc import Callable

Params = dict[str, Any]
SAME_LENGTHS = "same lengths"
MAKERS: dict[str, Callable[[int, int], Params]] = {
    "without": lambda index, turn: {"ignore_eos": True},
    "one schema": lambda index, turn: {"json_schema": list_schema(0)},
    "32 schemas": lambda index, turn: {"json_schema": list_schema(index % 32)},
    "32 hard, cold": lambda index, turn: {"json_schema": hard_schema(32 * turn + index % 32)},
    SAME_LENGTHS: lambda index, turn: {"ignore_eos": True},
}


async def stream(engine: AsyncEngine, seed: int, params: Params) -> tuple[int, float, str, bool]:
    """Return the number of tokens, the time of the first one, the text, and whether it ended by itself."""
    draw = random.Random(seed)
    prompt = [draw.randrange(100, 3000) for _ in range(128)]
    num_tokens, first_at, text, has_ended = 0, 0.0, "", False
    async for chunk in engine.async_generate(input_ids=prompt, sampling_params=params, stream=True):
        first_at = first_at or time.perf_counter()
        num_tokens = chunk["meta_info"]["completion_tokens"]
        text += chunk["text"]
        has_ended = chunk["meta_info"]["finish_reason"] == "stop"
    return num_tokens, first_at, text, has_ended


async def rates(engine: AsyncEngine, num_streams: int, num_new: int, repeat: int) -> None:
    seeds = count()
    lengths: list[list[int]] = []  # of the answers of each turn
    for name, make in MAKERS.items():
        given, lengths = lengths, []
        found: list[float] = []
        num_ended = num_valid = 0
        for turn in range(-1, repeat):
            base = {"max_new_tokens": num_new, "temperature": 0.6}
            params = [{**base, **make(index, turn + 1)} for index in range(num_streams)]
            if name == SAME_LENGTHS:
                params = [{**each, "max_new_tokens": most} for each, most in zip(params, given[turn + 1], strict=True)]
            started = time.perf_counter()
            rows = await asyncio.gather(*(stream(engine, next(seeds), each) for each in params))
            lengths.append([row[0] for row in rows])
            if turn >= 0:
                found.append(sum(row[0] for row in rows) / (time.perf_counter() - started))
            for (_, _, text, has_ended), each in zip(rows, params, strict=True):
                if has_ended and "json_schema" in each:
                    num_ended += 1
                    num_valid += jsonschema.Draft202012Validator(each["json_schema"]).is_valid(json.loads(text))
        figures = f"{statistics.median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f}) tok/s"
        print(f"{name:<16} {figures}; {num_valid} of {num_ended} ended answers valid", flush=True)


async def alone(engine: AsyncEngine, repeat: int) -> None:
    """Measure one request at a time: tokens that a grammar forces are not computed one by one."""
    kinds: dict[str, Params] = {
        "without": {"ignore_eos": True},
        "record": {"json_schema": record_schema(0)},
        "long names": {"json_schema": named_schema()},
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(-1, repeat * 4):
        for name, params in kinds.items():
            started = time.perf_counter()
            num_tokens, *_ = await stream(engine, turn, {"max_new_tokens": 64, "temperature": 0.6, **params})
            if turn >= 0:
                found[name].append(num_tokens / (time.perf_counter() - started))
    for name, each in found.items():
        print(
            f"alone, {name:<10} {statistics.median(each):,.0f} ({min(each):,.0f} to {max(each):,.0f}) tok/s", flush=True
        )


async def first_tokens(engine: AsyncEngine, repeat: int) -> None:
    numbers = count(10_000)
    kinds: dict[str, Callable[[], Params]] = {
        "none": dict,
        "fresh record": lambda: {"json_schema": record_schema(next(numbers))},
        "fresh hard": lambda: {"json_schema": hard_schema(next(numbers))},
    }
    for name, make in kinds.items():
        found: list[float] = []
        for _ in range(repeat * 8):
            params = {"max_new_tokens": 2, "temperature": 0.6, **make()}
            started = time.perf_counter()
            found.append(((await stream(engine, next(numbers), params))[1] - started) * 1000)
        print(f"first token, {name:<13} {statistics.median(found):.2f} (most {max(found):.2f}) ms", flush=True)


async def main(options: argparse.Namespace) -> None:
    folder = options.folder or write_folder(options.models, "a")
    async with AsyncEngine(str(folder), load_format="dummy" if options.folder is None else "auto") as engine:
        await rates(engine, options.streams, options.num_new, options.repeat)
        await alone(engine, options.repeat)
        await first_tokens(engine, options.repeat)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("/tmp/bench-models"))
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--num-new", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    asyncio.run(main(parser.parse_args()))
