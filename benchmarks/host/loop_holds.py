"""How long the event loop is held while the engine takes in large prompts.

    python -m benchmarks.host.loop_holds [--repeats 5] [--json]

A task that does nothing takes turns with the engine; its longest wait for a turn is the hold. Every prompt but those of
the batches is refused as too large for the demo model, which is what becomes of most prompts of this size.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from aioengine import AsyncEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioengine.answers import Answer, BatchOutput
    from aioengine.stream import Generation

    Call = Callable[[], Generation[Answer] | Generation[BatchOutput] | Generation[Answer | BatchOutput]]

ONE = {"max_new_tokens": 1}
MEGABYTES = 10
LEAVE_AFTER_S = 0.2


@dataclass
class Hold:
    """The longest wait for a turn of the loop in milliseconds, over the repeats."""

    what: str
    min_ms: float
    median_ms: float
    max_ms: float


def calls(engine: AsyncEngine) -> dict[str, Call]:
    size = MEGABYTES * 1_000_000
    ascii_text, han = "word " * (size // 5), "漢字" * (size // 6)
    messages = [{"role": "user", "content": "hello there " * 10}] * (size // 120)
    ids = [number % 500 for number in range(3_000_000)]
    texts, rows = ["b" * 1000] * 10_000, [ids[:300]] * 10_000
    return {
        "10 MB of ASCII": lambda: engine.async_generate(ascii_text, ONE),
        "10 MB of Han characters": lambda: engine.async_generate(han, ONE),
        "a chat of 10 MB in one message": lambda: engine.async_chat([{"role": "user", "content": han}], ONE),
        "a chat of 10 MB in 83,333 messages": lambda: engine.async_chat(messages, ONE),
        "3,000,000 ids": lambda: engine.async_generate(input_ids=ids, sampling_params=ONE),
        "a batch of 10,000 texts, left early": lambda: engine.async_generate(texts, ONE),
        "a batch of 10,000 times 300 ids, left early": lambda: engine.async_generate(
            input_ids=rows, sampling_params=ONE
        ),
    }


async def longest_wait(call: Call) -> float:
    """In milliseconds, from before the call until after its end."""
    is_over = asyncio.Event()

    async def take_turns() -> float:
        longest, last = 0.0, time.perf_counter()
        while not is_over.is_set():
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        return longest * 1000

    turns = asyncio.create_task(take_turns())
    await asyncio.sleep(0.01)
    with suppress(ValueError, TimeoutError):
        await asyncio.wait_for(call(), LEAVE_AFTER_S)
    await asyncio.sleep(0.01)
    is_over.set()
    return await turns


async def measure(repeats: int) -> list[Hold]:
    holds: list[Hold] = []
    async with AsyncEngine(device="cpu") as engine:
        for what, call in calls(engine).items():
            waits = [await longest_wait(call) for _ in range(repeats)]
            holds.append(Hold(what, round(min(waits), 2), round(statistics.median(waits), 2), round(max(waits), 2)))
    return holds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    arguments = parser.parse_args()
    holds = asyncio.run(measure(arguments.repeats))
    if arguments.json:
        print(json.dumps([asdict(hold) for hold in holds]))
        return
    print("hold of the loop, ms:    min  median     max")
    for hold in holds:
        print(f"{hold.min_ms:28.2f} {hold.median_ms:7.2f} {hold.max_ms:7.2f}   {hold.what}")


if __name__ == "__main__":
    main()
