"""A complete engine whose model is divided among ranks: its answers, and the loss of a rank."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from typing import TYPE_CHECKING, Any

import pytest

from aioengine import AsyncEngine, Engine
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.process

PROMPTS = ["The capital of France is", "Once upon a time"]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True},
    {"temperature": 0.8, "seed": 5, "max_new_tokens": 60, "ignore_eos": True, "repetition_penalty": 1.1},
]
ARGUMENTS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 4096}


def pid_of(engine: AsyncEngine, role: str) -> int:
    return next(process["pid"] for process in engine.health()["processes"] if process["role"] == role)


async def stream_ids(
    engine: AsyncEngine, prompt: str, params: dict[str, Any], function: Callable[[], None]
) -> list[int]:
    """Stream an answer, and call ``function`` after a few tokens. Return all ids."""
    token_ids: list[int] = []
    async for chunk in engine.async_generate(prompt, params, stream=True):
        was_short = len(token_ids) < 10
        token_ids += chunk["output_ids"]
        if was_short and len(token_ids) >= 10:
            function()
    return token_ids


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with Engine(**ARGUMENTS) as engine:
        return [answer["output_ids"] for answer in engine.generate(PROMPTS, PARAMS)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "number"),
    [
        ("runner-1", signal.SIGKILL),
        ("scheduler", signal.SIGKILL),
        ("runner-1", signal.SIGSTOP),
        ("detokenizer", signal.SIGKILL),
    ],
)
async def test_streams_continue_after_the_loss_of_a_process(
    expected: list[list[int]], role: str, number: signal.Signals
) -> None:
    """All ranks are replaced if one of them is lost."""
    async with AsyncEngine(**ARGUMENTS, tp_size=2, stall_timeout=6) as engine:
        before = pid_of(engine, "scheduler"), pid_of(engine, "runner-1")
        lost = [pid_of(engine, role)]

        def kill() -> None:
            if lost:  # only the first stream kills
                os.kill(lost.pop(), number)

        streams = [stream_ids(engine, prompt, params, kill) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        assert await asyncio.gather(*streams) == expected
        after = pid_of(engine, "scheduler"), pid_of(engine, "runner-1")
        assert after == before if role == "detokenizer" else set(before).isdisjoint(after)
        again = await asyncio.gather(*(engine.async_generate(*pair) for pair in zip(PROMPTS, PARAMS, strict=True)))
        assert [answer["output_ids"] for answer in again] == expected
    await until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in (*before, *after)))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"tp_size": 2, "dp_size": 2}])
async def test_cancellations_leave_the_ranks_in_step(expected: list[list[int]], sizes: dict[str, int]) -> None:
    draw = random.Random(3)

    async def leave(engine: AsyncEngine, number: int) -> None:
        params = {"max_new_tokens": 100, "temperature": number % 2, "ignore_eos": True}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(draw.random()):
                await engine.async_generate("a b c " * draw.randint(1, 60), params)

    limits = {"max_total_tokens": 400, "page_size": 4, "chunked_prefill_size": 64, "max_running_requests": 8}
    async with AsyncEngine(**{**ARGUMENTS, **limits, **sizes}) as engine:
        for number in range(5):
            streams = [engine.async_generate(*pair) for pair in zip(PROMPTS, PARAMS, strict=True)]
            left = [leave(engine, 12 * number + other) for other in range(12)]
            answers, *_ = await asyncio.gather(asyncio.gather(*streams), *left)
            assert [answer["output_ids"] for answer in answers] == expected
        stats = engine.stats()
        assert stats["num_aborted"] > 10
        assert stats["num_restarts"] == 0
