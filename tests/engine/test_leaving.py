"""Streams that are left early, aborts, and slow readers. Nothing may be left in the engine."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import suppress

import pytest

from aioengine.api.stream import Stream
from aioengine.errors import RequestError
from aioengine.frontend.calls.call import Call, CallRow
from aioengine.protocol.messages import FinishCode
from tests.engine.engine_double import World, expected_text
from tests.kit.waiting import until

GREEDY = {"temperature": 0, "max_new_tokens": 6}
LONG = {"temperature": 0, "max_new_tokens": 400}


async def assert_nothing_is_left(world: World) -> None:
    await until(lambda: world.engine.stats()["num_streams"] == 0 and not world.double.live)
    out = await world.engine.async_generate("after", GREEDY)
    assert out["text"] == expected_text("after", 6)


def aborted_uids(world: World) -> list[int]:
    return [uid for abort in world.double.aborts for uid in abort.uids]


class TestStreams:
    async def test_break_aborts_when_nothing_holds_the_stream(self, world: World) -> None:
        async for _ in world.engine.async_generate("a", LONG, stream=True):
            break
        await until(lambda: aborted_uids(world) == [0])
        await assert_nothing_is_left(world)

    async def test_aclose_aborts_at_once_and_twice_is_harmless(self, world: World) -> None:
        stream = world.engine.async_generate("a", LONG, stream=True)
        await anext(stream)
        await stream.aclose()
        assert aborted_uids(world) == [0]
        await stream.aclose()
        stream.close()
        assert aborted_uids(world) == [0]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await assert_nothing_is_left(world)

    async def test_async_with_aborts_also_on_an_exception(self, world: World) -> None:
        async def fail() -> None:
            async with world.engine.async_generate("a", LONG, stream=True) as stream:
                async for _ in stream:
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert aborted_uids(world) == [0]
        await assert_nothing_is_left(world)

    async def test_closing_after_the_end_does_nothing(self, world: World) -> None:
        async with world.engine.async_generate("a", GREEDY, stream=True) as stream:
            assert len([chunk async for chunk in stream]) == 6
        await stream.aclose()
        stream.abort()
        assert world.double.aborts == []

    async def test_dropping_the_stream_aborts(self, world: World) -> None:
        stream = world.engine.async_generate("a", LONG, stream=True)
        await anext(stream)
        gone = weakref.ref(stream)
        del stream
        gc.collect()
        assert gone() is None
        await until(lambda: aborted_uids(world) == [0])
        await assert_nothing_is_left(world)

    async def test_stream_in_a_reference_cycle_is_collected(self, world: World) -> None:
        holder: dict[str, object] = {}
        holder["self"], holder["stream"] = holder, world.engine.async_generate("a", LONG, stream=True)
        await until(lambda: bool(world.double.live))
        del holder
        gc.collect()
        await until(lambda: aborted_uids(world) == [0])

    async def test_unread_stream_can_be_left(self, world: World) -> None:
        stream = world.engine.async_generate("a", GREEDY, stream=True)
        await until(lambda: bool(world.double.submits) and not world.double.live)
        await stream.aclose()
        assert [chunk async for chunk in stream] == []

    async def test_leaving_ends_all_rows_of_a_batch(self, world: World) -> None:
        async with world.engine.async_generate(["a", "b"], {**LONG, "n": 2}, stream=True) as stream:
            await anext(stream)
        assert sorted(aborted_uids(world)) == [0, 1, 2, 3]
        await assert_nothing_is_left(world)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_turns", [*range(12), 25])
async def test_a_cancelled_task_leaves_nothing(world: World, num_turns: int, stream: bool) -> None:
    """The task is cancelled before its first step, in the tokenizer, in the queue, while decoding, and near the end."""

    async def read() -> None:
        if stream:
            async for _ in world.engine.async_generate("abc", LONG, stream=True):
                pass
        else:
            await world.engine.async_generate("abc", LONG)

    world.double.step_s = 0.001
    task = asyncio.create_task(read())
    for _ in range(num_turns):
        await asyncio.sleep(0.0005 if num_turns == 25 else 0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    await assert_nothing_is_left(world)


@pytest.mark.parametrize("num_turns", range(6))
async def test_generation_in_a_cancelled_task_leaves_nothing(world: World, num_turns: int) -> None:
    task = asyncio.create_task(world.engine.async_generate("abc", LONG))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_nothing_is_left(world)


async def test_timeout_of_wait_for_leaves_nothing(world: World) -> None:
    world.double.is_held = True
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(world.engine.async_generate("a", LONG), 0.5)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await world.engine.async_generate("a", LONG)
    assert len(aborted_uids(world)) == 2
    world.double.resume()
    await assert_nothing_is_left(world)


async def test_a_second_reader_of_a_cancelled_generation_gets_an_error(world: World) -> None:
    world.double.is_held = True
    generation = world.engine.async_generate("a", LONG)
    first, second = asyncio.create_task(generation), asyncio.create_task(generation)
    await until(lambda: bool(world.double.live))
    first.cancel()
    with pytest.raises(RequestError, match="closed or cancelled"):
        await second
    assert first.cancelled()


class TestAbort:
    async def test_abort_ends_the_stream_with_a_reason_and_keeps_the_text(self, world: World) -> None:
        stream = world.engine.async_generate("a", LONG, stream=True)
        text = (await anext(stream))["text"]
        stream.abort()
        chunks = [chunk async for chunk in stream]
        text += "".join(chunk["text"] for chunk in chunks)
        reason = chunks[-1]["meta_info"]["finish_reason"]
        assert reason == "abort"
        assert text == expected_text("a", len(text))
        await assert_nothing_is_left(world)

    async def test_abort_from_another_task_by_id(self, world: World) -> None:
        task = asyncio.create_task(world.engine.async_generate("a", LONG, rid="mine"))
        await until(lambda: bool(world.double.live))
        world.engine.abort_request("unknown")
        for odd in ("", "_", "_" * 100_000, "mine_" + "1" * 5000, "mine_" + "٣", "mine_0", "\ud800", "\0"):
            world.engine.abort_request(odd)
        with pytest.raises(ValueError, match="needs a rid, or abort_all=True"):
            world.engine.abort_request()
        with pytest.raises(TypeError, match="abort_all must be True or False, got 'false'"):
            world.engine.abort_request(abort_all="false")  # type: ignore[arg-type]  # would abort every request
        with pytest.raises(TypeError, match="rid must be a string, got 5"):
            world.engine.abort_request(5)  # type: ignore[arg-type]
        world.engine.tokenizer_manager.abort_request("mine")
        out = await task
        assert out["meta_info"]["finish_reason"] == "abort"
        assert out["meta_info"]["id"] == "mine"

    async def test_abort_before_it_was_submitted(self, world: World) -> None:
        generation = world.engine.async_generate("a", LONG)
        generation.abort()
        out = await generation
        assert (out["text"], out["meta_info"]["finish_reason"]) == ("", "abort")
        assert world.double.submits == []
        await assert_nothing_is_left(world)

    async def test_abort_all(self, world: World) -> None:
        generations = [world.engine.async_generate(prompt, LONG) for prompt in "abc"]
        await until(lambda: len(world.double.live) == 3)
        world.engine.abort_request(abort_all=True)
        assert [(await generation)["meta_info"]["finish_reason"] for generation in generations] == ["abort"] * 3
        await assert_nothing_is_left(world)

    async def test_rows_of_a_call_can_be_aborted_by_id(self, world: World) -> None:
        generation = world.engine.async_generate(["a", "b", "c"], {**LONG, "n": 2}, rid="x")
        await until(lambda: len(world.double.live) == 6)
        world.engine.abort_request("x_0_1")
        world.engine.abort_request("x_2")
        for wrong in ("x_3", "x_0_2", "x_00", "x_", "_0", "x_0_1_0", "y_0"):
            world.engine.abort_request(wrong)
        reasons = (await generation)["meta_info"]["finish_reason"]
        assert [str(reason) for reason in reasons] == ["length", "abort", "length", "length", "abort", "abort"]

    async def test_rows_that_were_not_started_can_be_aborted(self) -> None:
        here = World(max_running=1)
        async with here.engine as engine:
            here.double.is_held = True
            generation = engine.async_generate(["a"] * 6, GREEDY, rid="x")
            await until(lambda: len(here.double.live) == 2)
            engine.abort_request("x_4")
            here.double.resume()
            outs = await generation
            assert [str(reason) for reason in outs["meta_info"]["finish_reason"]] == [
                *["length"] * 4,
                "abort",
                "length",
            ]

            here.double.is_held = True
            generation = engine.async_generate(["a"] * 6, GREEDY)
            await until(lambda: len(here.double.live) == 2)
            generation.abort()
            assert (await generation)["meta_info"]["finish_reason"] == ["abort"] * 6

    async def test_generation_can_be_paused_and_continued(self, world: World) -> None:
        generation = world.engine.async_generate("a", LONG)
        await until(lambda: bool(world.double.live))
        assert await world.engine.pause_generation()
        assert (await generation)["meta_info"]["finish_reason"] == "abort"
        assert await world.engine.continue_generation()
        assert [control.name for control in world.double.controls] == ["pause", "continue"]
        with pytest.raises(ValueError, match="'in_place'"):
            await world.engine.pause_generation("keep")  # type: ignore[arg-type]


class TestSlowReaders:
    async def test_unread_chunks_are_merged(self, world: World) -> None:
        stream = world.engine.async_generate("a", {**LONG, "max_new_tokens": 300}, stream=True)
        await until(lambda: bool(world.double.submits) and not world.double.live)
        chunks = [chunk async for chunk in stream]
        assert len(chunks) == 1
        assert chunks[0]["text"] == expected_text("a", 300)
        assert chunks[0]["meta_info"]["completion_tokens"] == 300

    async def test_a_stalled_reader_holds_one_piece(self, world: World) -> None:
        stream = await world.engine.async_generate("a", {**LONG, "max_new_tokens": 300}, stream=True)
        await anext(stream)
        rows = [row for output in gc.get_objects() if type(output).__name__ == "CallRow" for row in [output]]
        [row] = [row for row in rows if row.uid == 0]
        await until(lambda: not world.double.live)
        assert len(row.more_texts) <= 64
        text = "".join([chunk["text"] async for chunk in stream])
        assert text == expected_text("a", 300)[1:]

    async def test_a_slow_reader_does_not_slow_the_others(self, world: World) -> None:
        slow = world.engine.async_generate("s", LONG, stream=True)
        await anext(slow)
        for prompt in "abc":
            assert (await world.engine.async_generate(prompt, GREEDY))["text"] == expected_text(prompt, 6)
        await slow.aclose()


async def test_ended_calls_leave_no_objects(world: World) -> None:
    """Ended, cancelled, aborted and dropped calls are forgotten."""
    gc.collect()
    for number in range(60):
        generation = world.engine.async_generate("a", LONG if number % 3 else GREEDY, stream=True)
        await anext(generation)
        if number % 3 == 1:
            await generation.aclose()
        elif number % 3 == 2:
            generation.abort()
            assert [chunk async for chunk in generation]
        else:
            assert [chunk async for chunk in generation]
    del generation
    await until(lambda: not world.double.live)
    gc.collect()
    kinds = (Call, CallRow, Stream)  # by type, because other packages have a class Stream, too
    assert [thing for thing in gc.get_objects() if type(thing) in kinds] == []
    assert world.engine.stats()["num_streams"] == 0


async def test_an_abort_carries_its_code(world: World) -> None:
    world.double.is_held = True
    generation = world.engine.async_generate("a", LONG)
    await until(lambda: bool(world.double.live))
    generation.abort()
    await generation
    assert [abort.code for abort in world.double.aborts] == [FinishCode.ABORT]
