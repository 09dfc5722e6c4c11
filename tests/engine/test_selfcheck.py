"""``selfcheck``: finished requests are computed again, one by one and without prefix hits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aioengine.api.engine import BaseEngine
from aioengine.api.selfcheck import TokenDifference
from aioengine.frontend.calls.finished import RecordedRequest
from aioengine.supervision.ledger import MAX_FINISHED_TOKENS, NUM_FINISHED
from aioengine.testing.fake_engine import fake_async_engine, fake_engine
from aioengine.testing.faults import Faults
from tests.kit.fake_adapters import write_adapter

pytestmark = pytest.mark.one_loop

PARAMS: dict[str, Any] = {"max_new_tokens": 6}


def remembered(engine: BaseEngine) -> list[RecordedRequest]:
    return list(engine._frontend_anywhere().calls.finished)


async def test_all_kinds_of_requests_are_reproduced() -> None:
    async with fake_async_engine(max_running=3, chunk_tokens=16) as engine:
        prompts = ["a longer prompt, whose beginning is cached " + text for text in "abcd"]
        await engine.async_generate(prompts, {**PARAMS, "n": 2, "temperature": 1.5}, rid="batch")
        async for _ in engine.async_generate("a stream", PARAMS, stream=True, rid="stream"):
            pass
        await engine.async_chat([{"role": "user", "content": "hi"}], PARAMS)
        await engine.async_generate("with logprobs", PARAMS, return_logprob=True, cache_salt="mine")
        session = await engine.open_session()
        for text in ("first", " second"):
            await engine.async_generate(text, PARAMS, session_params={"id": session, "rid": None})
        num_cached = engine.stats()["cached_tokens"]
        assert len(remembered(engine)) == 13
        assert await engine.selfcheck(NUM_FINISHED) == []
        assert len(remembered(engine)) == 13  # its own requests are not recorded
        await engine.async_generate("the last", PARAMS)
        assert engine.stats()["cached_tokens"] == num_cached  # it has no prefix hits
        assert await engine.selfcheck(NUM_FINISHED) == []


async def test_a_difference_has_the_rid_the_position_and_both_ids() -> None:
    async with fake_async_engine({"": "abcdef"}) as engine:
        await asyncio.gather(*(engine.async_generate("x", rid=name) for name in ("equal", "differs", "short", "long")))
        for request in remembered(engine):
            if request.rid == "differs":
                request.output_ids[2] = 5
            elif request.rid == "short":
                del request.output_ids[3:]
            elif request.rid == "long":
                request.output_ids.append(7)
        assert sorted(await engine.selfcheck()) == [
            TokenDifference("differs", 2, (5, ord("c"))),
            TokenDifference("long", 7, (7, None)),
            TokenDifference("short", 3, (None, ord("d"))),
        ]


async def test_only_the_last_requests_are_computed() -> None:
    async with fake_async_engine() as engine:
        for number in range(NUM_FINISHED + 5):
            await engine.async_generate("x", PARAMS, rid=f"{number}")
        assert [request.rid for request in remembered(engine)] == [f"{number}" for number in range(5, NUM_FINISHED + 5)]
        for request in remembered(engine):
            request.output_ids[0] = 1
        assert [difference.rid for difference in await engine.selfcheck(2)] == ["35", "36"]
        assert len(await engine.selfcheck()) == 8
        for wrong in (0, NUM_FINISHED + 1, 1.5):
            with pytest.raises((TypeError, ValueError), match="num_requests must be"):
                await engine.selfcheck(wrong)  # type: ignore[arg-type]


async def test_requests_without_a_reproducible_end_are_not_remembered() -> None:
    async with fake_async_engine(context_length=40_000, num_pages=8192) as engine:
        aborted = engine.async_generate("aborted", {"max_new_tokens": 10_000})
        await asyncio.sleep(0)
        aborted.abort()
        await aborted
        await engine.async_encode("a vector")
        await engine.async_generate(input_embeds=[[0.0] * 8] * 3, sampling_params=PARAMS)
        await engine.async_generate("nothing", {"max_new_tokens": 0}, return_logprob=True, top_logprobs_num=2)
        await engine.async_generate("x" * (MAX_FINISHED_TOKENS + 1), PARAMS)
        assert remembered(engine) == []
        assert await engine.selfcheck() == []


async def test_adapters_that_were_unloaded_or_loaded_again_are_skipped(tmp_path: Path) -> None:
    write_adapter(tmp_path / "first")
    async with fake_async_engine(max_loras_per_batch=2) as engine:
        for name in ("kept", "gone", "new"):
            assert await engine.load_lora_adapter(name, tmp_path / "first")
            await engine.async_generate("x", PARAMS, lora_path=name, rid=name)
        assert await engine.selfcheck() == []
        for request in remembered(engine):
            request.output_ids[0] = 1
        for name in ("gone", "new"):
            assert await engine.unload_lora_adapter(name)
        assert await engine.load_lora_adapter("new", tmp_path / "first")
        assert [difference.rid for difference in await engine.selfcheck()] == ["kept"]


async def test_a_request_that_survived_a_crash_is_equal(tmp_path: Path) -> None:
    faults = Faults(kill_at=4, once=str(tmp_path / "once"))
    async with fake_async_engine(faults=faults) as engine:
        await asyncio.gather(*(engine.async_generate(f"{number}", {"max_new_tokens": 9}) for number in range(3)))
        assert engine.stats()["num_restarts"] == 1
        assert len(remembered(engine)) == 3
        assert await engine.selfcheck() == []


def test_synchronous_engine_has_selfcheck() -> None:
    with fake_engine() as engine:
        assert engine.selfcheck() == []
        engine.generate(["a", "b"], PARAMS)
        remembered(engine)[0].output_ids[0] = 1
        assert [difference.position for difference in engine.selfcheck(num_requests=2)] == [0]
