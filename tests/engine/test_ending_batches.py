"""Rows of a large batch are ended over many iterations of the loop, so that other requests are not delayed."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest

from aioengine.api.answers import BatchOutput
from aioengine.api.engine import AsyncEngine
from aioengine.api.stream import Generation, Stream
from aioengine.errors import EngineClosedError, EngineDeadError
from aioengine.frontend.calls.call import CallRow
from aioengine.frontend.calls.calls import MAX_ROWS_FREED_AT_ONCE
from aioengine.frontend.intake.submitter import MAX_ROWS_ENDED_AT_ONCE
from aioengine.testing.fake_engine import fake_async_engine, fake_engine
from tests.engine.engine_double import World
from tests.kit.waiting import until

MANY = 3 * MAX_ROWS_ENDED_AT_ONCE + 100
MAX_CALLS = 20_000
"""In a callback of the loop: twice what the longest one makes, and a fifth of what ``HUGE`` rows at once would make."""
HUGE = 10_000
LONG = {"max_new_tokens": 400, "temperature": 0}


@contextmanager
def counted_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Count the calls of Python functions in each callback of the loop."""
    num_calls, counts = 0, list[int]()
    plain, profile = asyncio.Handle._run, sys.getprofile()

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    def run(handle: asyncio.Handle) -> None:
        before = num_calls
        plain(handle)
        counts.append(num_calls - before)

    gc.disable()  # garbage collection calls finalizers of other objects
    sys.setprofile(count)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(asyncio.Handle, "_run", run)
            yield counts
    finally:
        sys.setprofile(profile)
        gc.enable()


def abort_all(engine: AsyncEngine) -> None:
    engine.abort_request(abort_all=True)


def expire(engine: AsyncEngine) -> None:
    """Do nothing. The timeout ends the batch."""


def die(engine: AsyncEngine) -> None:
    engine._frontend_here().fail(EngineDeadError("it died"))


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("end", [abort_all, expire, die])
def test_callbacks_that_end_a_large_batch_are_short(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[AsyncEngine], None], is_stream: bool
) -> None:
    async def most_calls() -> int:
        async with fake_async_engine(processes=False) as engine:
            timeout = 0.2 if end is expire else None
            call: Any = engine.async_generate(
                ["a"] * HUGE, LONG, stream=is_stream, return_exceptions=True, timeout=timeout
            )
            await asyncio.sleep(0.1)
            with counted_calls(monkeypatch) as counts:
                asyncio.get_running_loop().call_soon(end, engine)
                await until(lambda: engine.stats()["num_streams"] == 0, 30)
                await call.aclose()  # also frees unread answers
                await asyncio.sleep(0)
            return max(counts)

    assert asyncio.run(most_calls()) < MAX_CALLS  # only asyncio's own loop runs handles in Python


async def test_answers_that_arrived_are_kept_when_the_engine_dies() -> None:
    async with fake_async_engine(processes=False, max_running=1024, num_pages=40_000, chunk_tokens=20_000) as engine:
        calls = [asyncio.ensure_future(engine.async_generate("a", {"max_new_tokens": 3})) for _ in range(500)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)  # all rows end in the same step
        assert not all(call.done() for call in calls)
        die(engine)
        assert {str(answer["meta_info"]["finish_reason"]) for answer in await asyncio.gather(*calls)} == {"length"}


def num_rows_in_memory() -> int:
    return sum(type(thing) is CallRow for thing in gc.get_objects())


async def test_unread_rows_are_freed_over_several_iterations_of_the_loop() -> None:
    num_rows = 2 * MAX_ROWS_FREED_AT_ONCE + 1
    async with fake_async_engine(processes=False) as engine:
        call: Any = engine.async_generate(["a"] * num_rows, LONG, stream=True, return_exceptions=True)
        await asyncio.sleep(0.1)
        engine.abort_request(abort_all=True)
        await until(lambda: engine.stats()["num_streams"] == 0, 30)
        before = num_rows_in_memory()
        await call.aclose()
        counts = [num_rows_in_memory()]
        for _ in range(3):
            await asyncio.sleep(0)
            counts.append(num_rows_in_memory())
    freed = [last - count for last, count in pairwise([before, *counts])]
    assert freed == [MAX_ROWS_FREED_AT_ONCE, MAX_ROWS_FREED_AT_ONCE, 1, 0]


async def started_batch(world: World, **options: Any) -> Any:
    """Return a batch of which the engine has the first rows. The engine is held."""
    world.double.is_held = True
    call: Any = world.engine.async_generate(["a"] * MANY, LONG, rid="x", **options)
    await until(lambda: len(world.double.live) == 16)
    return call


async def wait_until_partly_ended(world: World) -> None:
    """Wait until some rows of the batch have ended."""
    [call] = world.engine._frontend_here().calls.opened
    while call.num_started < MAX_ROWS_ENDED_AT_ONCE:  # noqa: ASYNC110  # it takes some turns
        await asyncio.sleep(0)
    assert call.num_started < MANY


async def check_nothing_is_left(world: World) -> None:
    await until(lambda: world.engine.stats()["num_streams"] == 0)
    frontend = world.engine._frontend_here()
    limits = frontend.limits
    assert (limits.num_calls, limits.num_tokens, limits.num_bytes) == (0, 0, 0)
    assert not frontend.delivery.rows
    assert len(world.double.submits) == 16  # no other row has started
    world.double.resume()
    again = await world.engine.async_generate("a", {"max_new_tokens": 2}, rid="x")
    assert again["meta_info"]["id"] == "x"


def check_answers(answers: BatchOutput, reason: str) -> None:
    assert len(answers) == MANY
    assert answers["meta_info"]["finish_reason"] == [reason] * MANY
    assert answers["meta_info"]["id"] == [f"x_{place}" for place in range(MANY)]


async def test_batch_can_be_aborted_again_while_it_ends() -> None:
    async with (world := World()).engine as engine:
        task = asyncio.ensure_future(await started_batch(world))
        abort_all(engine)
        await wait_until_partly_ended(world)
        engine.abort_request("x")
        engine.abort_request(f"x_{MANY - 1}")
        with pytest.raises(ValueError, match="in use"):
            engine.async_generate("a", rid="x")
        check_answers(await task, "abort")
        await check_nothing_is_left(world)


async def test_stream_returns_each_end_once() -> None:
    async with (world := World()).engine as engine:
        call = await started_batch(world, stream=True)
        abort_all(engine)
        ends: list[int] = []
        async for chunk in call:
            assert chunk["meta_info"]["finish_reason"] == "abort"
            assert chunk["meta_info"]["id"] == f"x_{chunk['index']}"
            ends.append(chunk["index"])
        assert sorted(ends) == list(range(MANY))
        await check_nothing_is_left(world)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_batch_can_be_left_while_it_ends(is_stream: bool) -> None:
    async with (world := World()).engine as engine:
        call = await started_batch(world, stream=is_stream)
        abort_all(engine)
        await wait_until_partly_ended(world)
        await call.aclose()
        await check_nothing_is_left(world)
        assert not engine._frontend_here().calls.submitter._ending


@pytest.mark.parametrize("returns_exceptions", [True, False])
async def test_engine_can_die_while_a_batch_ends(returns_exceptions: bool) -> None:
    async with (world := World()).engine as engine:
        call = await started_batch(world, return_exceptions=returns_exceptions)
        world.double.ignores_aborts_and_controls = True
        abort_all(engine)
        await wait_until_partly_ended(world)
        die(engine)
        if not returns_exceptions:
            with pytest.raises(EngineDeadError):
                await call
            return
        answers = await call
        assert all(isinstance(entry, EngineDeadError) for entry in answers[:16])
        assert {entry["meta_info"]["finish_reason"] for entry in answers[16:]} == {"abort"}
        assert len(answers) == MANY


async def test_drain_waits_for_all_rows() -> None:
    async with (world := World()).engine as engine:
        task = asyncio.ensure_future(await started_batch(world))
        assert not await engine.drain(0.01)
        assert task.done() or await asyncio.wait_for(task, 30)
        assert engine.stats()["num_streams"] == 0
        check_answers(task.result(), "shutdown")


async def test_drain_waits_for_an_abort() -> None:
    async with (world := World()).engine as engine:
        call: Generation[BatchOutput] = await started_batch(world)
        abort_all(engine)
        await wait_until_partly_ended(world)
        assert await engine.drain(5)
        assert engine.stats()["num_streams"] == 0
        check_answers(await call, "abort")


async def test_shutdown_ends_all_waiting_calls() -> None:
    async with (world := World()).engine as engine:
        call = await started_batch(world, return_exceptions=True)
        await engine.shutdown()
        answers = await asyncio.wait_for(call, 30)
        assert len(answers) == MANY
        assert all(isinstance(entry, EngineClosedError) for entry in answers)


def test_shutdown_ends_waiting_threads() -> None:
    outcomes: list[BatchOutput] = []
    with fake_engine(processes=False, step_time_s=0.001) as llm:

        def work() -> None:
            outcomes.append(llm.generate(["a"] * 20_000, LONG, return_exceptions=True))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while llm.stats()["num_running"] == 0:
            time.sleep(0.001)
    thread.join(10)
    [answers] = outcomes
    assert len(answers) == 20_000
    assert isinstance(answers[-1], EngineClosedError)


async def test_row_does_not_start_if_it_was_aborted_while_its_prompt_was_tokenized() -> None:
    async with (world := World(max_running=64)).engine as engine:
        world.double.is_held = world.double.ignores_aborts_and_controls = True
        world.tokenizer.delay_s = 0.05
        stream: Stream = engine.async_generate(["a"] * 200, LONG, stream=True)
        await until(lambda: len(world.double.live) == 64 and len(world.tokenizer.batches) == 2)
        abort_all(engine)
        [call] = engine._frontend_here().calls.opened
        await until(lambda: call.num_started == 200 and not call.next_rows.are_pending)
        assert len(world.double.submits) == 64
        assert (call.num_started, call.num_open) == (200, 64)
        await stream.aclose()


async def test_calls_that_end_together_are_ended_in_turns() -> None:
    async with (world := World(max_running=2)).engine as engine:
        world.double.is_held = True
        calls = [engine.async_generate(["a"] * MANY, LONG) for _ in range(4)]
        await until(lambda: len(world.double.live) == 16)
        open_calls = list(engine._frontend_here().calls.opened)
        abort_all(engine)
        nums: list[int] = []
        while engine.stats()["num_streams"]:
            nums.append(sum(call.num_started for call in open_calls))
            await asyncio.sleep(0)
        assert max(after - before for before, after in pairwise(nums)) <= MAX_ROWS_ENDED_AT_ONCE
        assert [len(await call) for call in calls] == [MANY] * 4
