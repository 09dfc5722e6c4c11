"""Many short answers with random options, while processes are killed: they equal the plain engine's, bit for bit."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import TYPE_CHECKING, Any

import pytest

from aioengine import AsyncEngine
from tests.processes.restart_kit import pid_of
from tests.processes.test_speculation import FEW, SCHEMA, TEXT, folders, shape_of

if TYPE_CHECKING:
    from tests.processes.test_speculation import Folders

__all__ = ["folders"]
pytestmark = pytest.mark.process

NUM_TOGETHER = 48

Request = tuple[str, dict[str, Any], dict[str, Any]]
"""A prompt, its sampling parameters, and its options."""


def random_request(number: int) -> Request:
    """Return a request for a short answer that repeats itself."""
    rng = random.Random(number)
    params: dict[str, Any] = {
        "max_new_tokens": rng.randrange(1, 17),
        "temperature": rng.choice([0, 0, 0.3, 1.0]),
        "seed": number,
        "ignore_eos": True,
        "allowed_token_ids": FEW,
    }
    options: dict[str, Any] = {}
    for changed in rng.sample(range(14), rng.choice([0, 1, 2, 3])):
        params |= [
            {"top_p": 0.7, "top_k": 3},
            {"min_p": 0.1},
            {"frequency_penalty": 0.3},
            {"presence_penalty": 0.2, "repetition_penalty": 1.1},
            {"logit_bias": {"75": 3.0}},
            {"stop_token_ids": [80], "ignore_eos": False, "min_new_tokens": rng.choice([0, 1])},
            {"stop": ["a", "th"]},
            {"stop_regex": "[a-c]."},
            {"n": 2},
            {"allowed_token_ids": None, "ignore_eos": False, "json_schema": SCHEMA},
            {"bad_words": [" the cat"], "allowed_token_ids": None},
            {},
            {},
            {},
        ][changed]
        if changed == 11:
            options |= {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": rng.choice([-1, 0])}
        if changed == 12:
            options |= {"return_hidden_states": True}
        if changed == 13:
            options |= {"lora_path": "one"}
    return TEXT * rng.randrange(1, 3), params, options


async def answer(engine: AsyncEngine, number: int) -> list[object]:
    prompt, params, options = random_request(number)
    return shape_of(engine, await engine.async_generate(prompt, params, **options))


async def storm(engine: AsyncEngine, plain: list[list[object]], *, num_answers: int, num_kills: int) -> int:
    """Ask for at least this number of answers, and kill a process from time to time. Return the number of answers."""
    rng, num_equal, num_killed = random.Random(0), 0, 0

    async def ask() -> None:
        nonlocal num_equal, num_killed
        while num_equal < num_answers:
            number = rng.randrange(len(plain))
            assert await answer(engine, number) == plain[number], random_request(number)
            num_equal += len(plain[number])
            if num_equal > num_answers * (num_killed + 1) // (num_kills + 1) and num_killed < num_kills:
                num_killed += 1
                os.kill(pid_of(engine, ["scheduler", "detokenizer"][num_killed % 4 == 0]), signal.SIGKILL)

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_TOGETHER):
            group.create_task(ask())
    assert engine.stats()["num_restarts"] == num_kills
    return num_equal


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("algorithm", "num_answers"), [("NGRAM", 10_000), ("STANDALONE", 8000), ("EAGLE3", 2000)])
async def test_twenty_thousand_answers_with_drafts_and_kills_equal_the_plain_engine(
    folders: Folders, algorithm: str, num_answers: int
) -> None:
    num_kills = 4
    async with AsyncEngine(**folders.arguments(None)) as engine:
        plain = await asyncio.gather(*(answer(engine, number) for number in range(500)))
    async with AsyncEngine(**folders.arguments(algorithm), max_restarts=num_kills + 1) as engine:
        assert await storm(engine, plain, num_answers=num_answers, num_kills=num_kills) >= num_answers
        assert engine.stats()["num_accepted_drafts"] > num_answers // 2
