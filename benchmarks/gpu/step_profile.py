"""The split of a decode step: what each part of it costs, through the public API of a running engine.

schedule, prepare, launch, sample: host time of the scheduler process, from torch's trace, which slows it down (launch
is what remains of a launch beside its parts). collect: waiting for the device. device: kernels, from the trace, gaps
left out. detokenize and frontend: CPU time of these processes, and step: wall time of a step, all without a trace.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import tempfile
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from pathlib import Path

    from aioengine import AsyncEngine

Split = dict[str, float]
Event = dict[str, Any]

PARTS = ("schedule", "prepare", "sample", "collect", "apply")
WARM_UP = 64
NUM_TRACED = 40
WATCHED_S = 1.0


async def split(engine: AsyncEngine, *, num_rows: int, num_tokens: int) -> Split:
    """Return the milliseconds of a step with this many streams, each after a prompt of 128 tokens."""
    streams = _Streams(engine, {"max_new_tokens": num_tokens, "ignore_eos": True, "temperature": 0.6})
    readers = [asyncio.create_task(streams.read(row)) for row in range(num_rows)]
    await streams.until(WARM_UP)
    found = await _watched(engine, streams)
    with tempfile.TemporaryDirectory() as folder:
        await engine.start_profile(folder, num_steps=NUM_TRACED)
        await streams.until(streams.count + NUM_TRACED + 8)
        found |= traced_parts(await engine.stop_profile())
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    return found


class _Streams:
    """``count``: tokens of the first of them, which gets one in every step."""

    def __init__(self, engine: AsyncEngine, sampling: dict[str, object]) -> None:
        self.count = 0
        self._engine = engine
        self._sampling = sampling
        self._goal = 0
        self._reached = asyncio.Event()

    async def read(self, row: int) -> None:
        prompt = [(row * 7919 + place * 31) % 200 for place in range(128)]
        async for chunk in self._engine.async_generate(input_ids=prompt, sampling_params=self._sampling, stream=True):
            if row == 0:
                self.count = chunk["meta_info"]["completion_tokens"]
                if self.count >= self._goal:
                    self._reached.set()
        self._reached.set()

    async def until(self, count: int) -> None:
        """Wait for so many tokens, or for an end."""
        self._goal = count
        self._reached.clear()
        await self._reached.wait()


async def _watched(engine: AsyncEngine, streams: _Streams) -> Split:
    """Measure the wall time of a step, and the CPU time of the processes other than the scheduler in it."""
    pids = {process["role"]: process["pid"] for process in engine.health()["processes"]}
    detokenizer = psutil.Process(pids["detokenizer"])
    started, own, theirs, before = time.perf_counter(), time.process_time(), _cpu(detokenizer), streams.count
    await asyncio.sleep(WATCHED_S)
    milliseconds = 1000 / max(streams.count - before, 1)
    return {
        "step": (time.perf_counter() - started) * milliseconds,
        "detokenize": (_cpu(detokenizer) - theirs) * milliseconds,
        "frontend": (time.process_time() - own) * milliseconds,
    }


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def traced_parts(path: str | Path) -> Split:
    """Return the milliseconds of each part of a step, from a trace of several."""
    with gzip.open(path) as file:
        events: list[Event] = json.load(file)["traceEvents"]
    spent: dict[str, float] = defaultdict(float)
    num_steps = 0
    for event in events:
        if event.get("cat") == "user_annotation":
            name = event["name"]
            is_launch = name.startswith("step ")
            num_steps += is_launch
            spent["launch" if is_launch else name] += event["dur"] / 1000
    spent["launch"] -= spent["prepare"] + spent["sample"]
    spent["device"] = busy_ms([event for event in events if event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}])
    names = (*PARTS[:2], "launch", *PARTS[2:], "device")
    return {name: spent[name] / max(num_steps, 1) for name in names}


def busy_ms(events: list[Event]) -> float:
    """Time in which at least one of these events goes on."""
    total, until = 0.0, 0.0
    for event in sorted(events, key=lambda event: event["ts"]):
        end = event["ts"] + event["dur"]
        total += max(0.0, end - max(until, event["ts"]))
        until = max(until, end)
    return total / 1000


def table(splits: dict[int, Split]) -> str:
    """Return a table with one row for each number of rows."""
    names = ["step", "schedule", "prepare", "launch", "sample", "device", "collect", "apply", "detokenize", "frontend"]
    lines = ["ms a step".ljust(12) + "".join(name.rjust(12) for name in names)]
    lines += [
        f"{rows} rows".ljust(12) + "".join(f"{found.get(name, 0.0):12.3f}" for name in names)
        for rows, found in splits.items()
    ]
    return "\n".join(lines)
