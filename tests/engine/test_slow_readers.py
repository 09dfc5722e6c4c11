"""Slow readers: their requests are merged, paused or aborted, and other requests are unaffected."""

from __future__ import annotations

import asyncio
import gc
import resource
from collections import deque
from typing import cast

import pytest

from aioengine.api.engine import AsyncEngine
from aioengine.api.stream import Stream
from aioengine.frontend.calls.call import Call, CallRow
from aioengine.frontend.calls.calls import Calls
from aioengine.frontend.calls.slow_readers import SlowReaders
from aioengine.settings.config import DeliveryConfig
from aioengine.testing.fake_engine import fake_async_engine
from tests.kit.calls import make_call
from tests.kit.waiting import until

pytestmark = pytest.mark.one_loop

AWAY_S = 0.08
LONG = {"max_new_tokens": 600, "temperature": 0}
NUM_STALLED = 1000
CEILING_BYTES = 48 * 1024 * 1024
"""For 1,000 stalled readers with 200 unread tokens each, everything that a request is made of included."""


async def text_of(stream: Stream) -> str:
    return "".join([chunk["text"] async for chunk in stream])


async def scheduler_stats(engine: AsyncEngine) -> dict[str, int]:
    [server_info] = (await engine.get_server_info())["internal_states"]  # type: ignore[misc]
    return server_info  # type: ignore[no-any-return]


def is_resting(engine: AsyncEngine) -> bool:
    stats = engine.stats()
    return stats["num_waiting"] > 0 and stats["num_running"] == 0


async def test_paused_request_resumes_at_the_same_token() -> None:
    async with fake_async_engine(slow_reader="pause", slow_reader_timeout_s=AWAY_S, step_time_s=0.002) as engine:
        expected = (await engine.async_generate("a", LONG))["text"]
        stream = engine.async_generate("a", LONG, stream=True)
        text = (await anext(stream))["text"]
        await until(lambda: is_resting(engine))
        stats = await scheduler_stats(engine)
        assert (stats["num_running"], stats["num_waiting"]) == (0, 1)
        assert stats["num_free_pages"] == stats["num_pages"]
        other = await engine.async_generate("b", {"max_new_tokens": 3})
        assert len(other["output_ids"]) == 3
        chunk = await anext(stream)
        assert 0 < len(chunk["output_ids"]) < 550
        assert text + chunk["text"] + await text_of(stream) == expected


async def test_suspended_request_can_be_left_aborted_or_expire() -> None:
    async with fake_async_engine(slow_reader="pause", slow_reader_timeout_s=AWAY_S, step_time_s=0.002) as engine:
        streams = [engine.async_generate("a", LONG, stream=True, timeout=1.0 if n == 2 else None) for n in range(3)]
        for stream in streams:
            await anext(stream)
        await until(lambda: is_resting(engine))
        await streams[0].aclose()
        streams[1].abort()
        reasons = [[chunk async for chunk in stream][-1]["meta_info"]["finish_reason"] for stream in streams[1:2]]
        assert reasons == ["abort"]
        await until(lambda: engine.stats()["num_streams"] == 0)
        assert [chunk async for chunk in streams[2]][-1]["meta_info"]["finish_reason"] == "deadline"
        stats = await scheduler_stats(engine)
        assert (stats["num_waiting"], stats["num_free_pages"]) == (0, stats["num_pages"])


async def test_drain_resumes_requests_suspended_for_slow_readers() -> None:
    async with fake_async_engine(slow_reader="pause", slow_reader_timeout_s=AWAY_S, step_time_s=0.002) as engine:
        expected = (await engine.async_generate("a", LONG))["text"]
        stream = engine.async_generate("a", LONG, stream=True)
        text = (await anext(stream))["text"]
        await until(lambda: is_resting(engine))
        async with asyncio.timeout(30):
            assert await engine.drain()  # the streams are not read during the drain
        assert text + await text_of(stream) == expected


async def test_policy_abort_ends_the_request_with_a_reason() -> None:
    async with fake_async_engine(slow_reader="abort", slow_reader_timeout_s=AWAY_S, step_time_s=0.002) as engine:
        stream = engine.async_generate("a", LONG, stream=True)
        await anext(stream)
        await until(lambda: engine.stats()["num_streams"] == 0)
        last = [chunk async for chunk in stream][-1]["meta_info"]["finish_reason"]
        assert last is not None
        assert (last, "slow_reader_timeout" in str(last["message"])) == ("abort", True)


@pytest.mark.parametrize("policy", ["pause", "abort"])
async def test_reader_that_reads_from_time_to_time_is_not_suspended(policy: str) -> None:
    async with fake_async_engine(slow_reader=policy, slow_reader_timeout_s=AWAY_S, step_time_s=0.002) as engine:
        stream = engine.async_generate("a", {"max_new_tokens": 200}, stream=True)
        num_tokens = 0
        async for chunk in stream:
            num_tokens += len(chunk["output_ids"])
            await asyncio.sleep(AWAY_S / 3)
        assert num_tokens == 200
        assert (await scheduler_stats(engine))["num_preemptions"] == 0
        whole = await engine.async_generate("a", {"max_new_tokens": 200})  # it is not read before its end
        assert len(whole["output_ids"]) == 200


def memory_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.slow
async def test_thousand_stalled_readers_use_bounded_memory() -> None:
    async with fake_async_engine(max_running=NUM_STALLED + 1, num_pages=20_000, chunk_tokens=4096) as engine:
        expected = (await engine.async_generate("quick", {**LONG, "max_new_tokens": 64}))["text"]
        gc.collect()
        before = memory_bytes()
        params = {"max_new_tokens": 200, "temperature": 1.0}
        prompts = ([number % 250, number // 250] for number in range(NUM_STALLED))
        stalled = [engine.async_generate(input_ids=ids, sampling_params=params, stream=True) for ids in prompts]
        while engine.stats()["num_streams"]:
            out = await engine.async_generate("quick", {**LONG, "max_new_tokens": 64})
            assert out["text"] == expected
        assert memory_bytes() - before < CEILING_BYTES
        rows = [thing for thing in gc.get_objects() if type(thing) is CallRow]
        assert sum(len(row.token_ids) for row in rows if isinstance(row.token_ids, list)) == 200 * NUM_STALLED
        last = [chunk async for chunk in stalled[-1]]
        assert [len(chunk["output_ids"]) for chunk in last] == [200]


async def test_reader_on_another_thread_does_not_break_the_check() -> None:
    class EmptiedAfterLen(deque[CallRow]):
        """Is empty although its length was 1, as if another thread had read the row."""

        def __len__(self) -> int:
            return 1

    call = make_call(is_stream=True)
    call.ready = EmptiedAfterLen()
    looks: list[int] = []

    class OneCall:
        @property
        def opened(self) -> list[Call]:
            looks.append(1)
            return [call]

    config = DeliveryConfig(slow_reader="pause", slow_reader_timeout_s=0.01)
    slow_readers = SlowReaders(config, cast("Calls", OneCall()))
    slow_readers.watch()
    await until(lambda: len(looks) > 2)
    slow_readers.stop()
