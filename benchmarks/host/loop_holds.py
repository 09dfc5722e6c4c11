"""How long the event loop is held while the engine takes in large prompts, and gives large answers.

    python -m benchmarks.host.loop_holds [--repeats 5] [--json]

A task that does nothing takes turns with the engine; its longest wait for a turn is the hold, with the collections of
Python's garbage collector. Large prompts, but those of the batches, are refused as too large for the demo model, which
is what becomes of most prompts of this size. Answers are freed by their caller: that is not measured.
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

    from aioengine.api.answers import Answer, BatchOutput
    from aioengine.api.stream import Generation

    Call = Callable[[], Generation[Answer] | Generation[BatchOutput] | Generation[Answer | BatchOutput]]

ONE = {"max_new_tokens": 1}
MEGABYTES = 10
LEAVE_AFTER_S = 0.2
END_AFTER_S = 60.0


@dataclass
class Hold:
    """The longest wait for an iteration of the loop in milliseconds, over the repeats."""

    what: str
    min_ms: float
    median_ms: float
    max_ms: float


def calls(engine: AsyncEngine) -> dict[str, Call]:
    size = MEGABYTES * 1_000_000
    ascii_text, han = "word " * (size // 5), "漢字" * (size // 6)
    messages = [{"role": "user", "content": "hello there " * 10}] * (size // 120)
    ids = [number % 500 for number in range(3_000_000)]
    vocab_size = engine.tokenizer.vocab_size
    asked = [list(range(min(3_000, vocab_size))) for _ in range(256)]
    texts, rows = ["b" * 1000] * 10_000, [ids[:300]] * 10_000
    return {
        "10 MB of ASCII": lambda: engine.async_generate(ascii_text, ONE),
        "10 MB of Han characters": lambda: engine.async_generate(han, ONE),
        "a chat of 10 MB in one message": lambda: engine.async_chat([{"role": "user", "content": han}], ONE),
        "a chat of 10 MB in 83,333 messages": lambda: engine.async_chat(messages, ONE),
        "3,000,000 ids": lambda: engine.async_generate(input_ids=ids, sampling_params=ONE),
        "logprobs of all tokens at 750 positions": lambda: engine.async_generate(
            "a b c" * 250, ONE, return_logprob=True, top_logprobs_num=vocab_size, logprob_start_len=0
        ),
        "20 logprobs a token of 64 rows that end together": lambda: engine.async_generate(
            ["a b c"] * 64, {"max_new_tokens": 300, "ignore_eos": True}, return_logprob=True, top_logprobs_num=20
        ),
        "3,000 token_ids_logprob for each of 256 rows": lambda: engine.async_generate(
            ["a"] * 256, ONE, return_logprob=True, token_ids_logprob=asked
        ),
        "hidden states of 64 rows": lambda: engine.async_generate(
            ["a b c" * 100] * 64, {"max_new_tokens": 100, "ignore_eos": True}, return_hidden_states=True
        ),
        "vectors of 5,000 texts": lambda: engine.async_encode(["a b c"] * 5_000),
        "a batch of 10,000 texts, left early": lambda: engine.async_generate(texts, ONE),
        "a batch of 10,000 times 300 ids, left early": lambda: engine.async_generate(
            input_ids=rows, sampling_params=ONE
        ),
    }


async def longest_wait(call: Call, leave_after_s: float) -> float:
    """Return the longest wait in milliseconds, from before the call until after its end."""
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
    answers: Answer | BatchOutput | None = None
    with suppress(ValueError, TimeoutError):
        answers = await asyncio.wait_for(call(), leave_after_s)
    await asyncio.sleep(0.01)
    is_over.set()
    longest = await turns
    del answers
    return longest


async def measure(repeats: int) -> list[Hold]:
    holds: list[Hold] = []
    async with AsyncEngine(device="cpu") as engine:
        for what, call in calls(engine).items():
            leave_after_s = LEAVE_AFTER_S if "left early" in what else END_AFTER_S
            waits = [await longest_wait(call, leave_after_s) for _ in range(repeats)]
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
