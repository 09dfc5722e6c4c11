"""Logprobs of the demo model do not depend on the batch, preemptions or lost processes."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from aioengine import AsyncEngine
from tests.processes import test_demo_engine
from tests.processes.restart_kit import pid_of, until_restarted
from tests.processes.test_demo_engine import PROMPTS, WAYS

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

SAMPLINGS = [
    {**sampling, "max_new_tokens": 90 if sampling.get("ignore_eos") else 48} for sampling in test_demo_engine.SAMPLINGS
]  # enough requests for preemptions
OPTIONS: dict[str, Any] = {
    "return_logprob": True,
    "logprob_start_len": [0, -1, 2, 0, 1, 30, 0],
    "top_logprobs_num": [2, 0, 1, 5, 0, 1, 3],
    "token_ids_logprob": [None, [7], None, [3, 4], None, None, [9]],
    "return_text_in_logprobs": [True, False] * 3 + [True],
}


def lists_of(piece: Any) -> dict[str, list[Any]]:
    info = dict(piece["meta_info"])
    return {name: value for name, value in info.items() if name.endswith("_logprobs")}


def options_of(place: int) -> dict[str, Any]:
    return {name: value[place] if isinstance(value, list) else value for name, value in OPTIONS.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(**WAYS[2]) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def batch(engine: AsyncEngine) -> Any:
    return await engine.async_generate(PROMPTS, SAMPLINGS, **OPTIONS)


async def test_no_number_depends_on_the_batch_or_on_preemptions(engine: AsyncEngine, batch: Any) -> None:
    assert sum(out["meta_info"]["num_preemptions"] for out in batch)
    for place in (0, 3, 5, 6):
        out = batch[place]
        alone = await engine.async_generate(PROMPTS[place], SAMPLINGS[place], **options_of(place))
        assert lists_of(alone) == lists_of(out)
        lengths = {name: len(value) for name, value in lists_of(out).items()}
        num_prompt = out["meta_info"]["prompt_tokens"]
        start = OPTIONS["logprob_start_len"][place]
        assert {lengths[name] for name in lengths if name.startswith("output")} == {len(out["output_ids"])}
        assert {lengths[name] for name in lengths if name.startswith("input")} == {
            max(num_prompt - start, 0) * (start >= 0)
        }


@pytest.mark.slow
async def test_no_number_depends_on_lost_processes(engine: AsyncEngine, batch: Any) -> None:
    for num_restarts, (place, role) in enumerate(((0, "scheduler"), (3, "detokenizer")), 1):
        joined: dict[str, list[Any]] = {}
        stream = engine.async_generate(PROMPTS[place], SAMPLINGS[place], stream=True, **options_of(place))
        async for chunk in stream:
            if not joined:
                os.kill(pid_of(engine, role), signal.SIGKILL)
            result = lists_of(chunk)
            assert len(result["output_token_logprobs"]) == len(chunk["output_ids"])
            for name, entries in result.items():
                joined.setdefault(name, []).extend(entries)
        assert joined == lists_of(batch[place])
        await until_restarted(engine, num_restarts)
