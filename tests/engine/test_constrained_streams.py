"""Awaiting a stream with a constraint waits until the scheduler has compiled it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioengine.errors import EngineDeadError, UnsupportedSchemaError
from aioengine.protocol.messages import End, FinishCode, TextChunks
from tests.engine.engine_double import World
from tests.kit.waiting import until

pytestmark = pytest.mark.one_loop

CONSTRAINED = {"regex": "[a-z]+", "temperature": 0, "max_new_tokens": 4}
PLAIN = {"temperature": 0, "max_new_tokens": 4}


async def awaited(world: World, num_rows: int, *arguments: Any, **options: Any) -> asyncio.Task[Any]:
    """Return a task that awaits a stream. The scheduler has all its rows, and no row has a token."""
    world.double.is_held = True
    task = asyncio.ensure_future(world.engine.async_generate(*arguments, stream=True, **options))
    await until(lambda: len(world.double.submits) == num_rows)
    return task


async def test_await_returns_once_the_grammar_is_compiled(world: World) -> None:
    task = await awaited(world, 1, "ab", CONSTRAINED)
    await asyncio.sleep(0)
    assert not task.done()
    world.double.events.on_messages([TextChunks(compiled=[0, 77])])
    stream = await task
    world.double.resume()
    assert len([chunk async for chunk in stream]) == 4


async def test_await_of_a_plain_stream_returns_at_once(world: World) -> None:
    stream = await (await awaited(world, 1, "ab", PLAIN))
    await stream.aclose()


async def test_await_raises_the_error_of_the_compiler(world: World) -> None:
    task = await awaited(world, 1, "ab", CONSTRAINED)
    end = End(0, FinishCode.UNSUPPORTED, "pattern", "/items", "no text fits it")
    world.double.events.on_messages([TextChunks(ended=[end])])
    with pytest.raises(UnsupportedSchemaError, match="no text fits it") as raised:
        await task
    assert (raised.value.pointer, raised.value.keyword) == ("/items", "pattern")


async def test_stream_without_await_raises_with_its_first_chunk(world: World) -> None:
    world.double.is_held = True
    stream = world.engine.async_generate("ab", CONSTRAINED, stream=True)
    first = asyncio.ensure_future(anext(stream))
    await until(lambda: bool(world.double.submits))
    end = End(0, FinishCode.UNSUPPORTED, "regex", message="no text fits it")
    world.double.events.on_messages([TextChunks(ended=[end])])
    with pytest.raises(UnsupportedSchemaError):
        await first


async def test_await_of_a_batch_waits_for_each_of_its_grammars(world: World) -> None:
    task = await awaited(world, 3, ["a", "b", "c"], [CONSTRAINED, PLAIN, {**CONSTRAINED, "regex": "x"}])
    world.double.events.on_messages([TextChunks(compiled=[0])])
    world.double.step()  # the first chunks are there
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    end = End(2, FinishCode.UNSUPPORTED, "pattern", "/items", "no text fits it")
    world.double.events.on_messages([TextChunks(ended=[end])])
    with pytest.raises(UnsupportedSchemaError, match="^prompt 2: no text fits it") as raised:
        await task
    assert (raised.value.pointer, raised.value.keyword) == ("/items", "pattern")


async def test_await_of_a_batch_waits_for_other_rows_after_one_has_failed(world: World) -> None:
    task = await awaited(world, 2, ["a", "b"], [CONSTRAINED, {**CONSTRAINED, "regex": "x"}], return_exceptions=True)
    world.double.end([1], FinishCode.UNSUPPORTED)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    world.double.events.on_messages([TextChunks(compiled=[0])])
    stream = await task
    world.double.resume()
    assert {chunk["index"] for chunk in [chunk async for chunk in stream]} == {0, 1}


async def test_await_waits_for_each_sample_of_a_prompt(world: World) -> None:
    task = await awaited(world, 2, "a", {**CONSTRAINED, "n": 2})
    world.double.events.on_messages([TextChunks(compiled=[1])])
    await asyncio.sleep(0)
    assert not task.done()
    world.double.events.on_messages([TextChunks(compiled=[0])])
    await (await task).aclose()


async def test_stream_with_refuse_late_is_accepted_after_compilation(world: World) -> None:
    task = await awaited(world, 1, "ab", CONSTRAINED, refuse_late=True, timeout=60)
    world.double.events.on_messages([TextChunks(compiled=[0])])
    await (await task).aclose()


@pytest.mark.parametrize(("code", "reason"), [(FinishCode.ABORT, "abort"), (FinishCode.DEADLINE, "deadline")])
async def test_stream_that_ends_during_compilation_can_be_read(world: World, code: FinishCode, reason: str) -> None:
    task = await awaited(world, 1, "ab", CONSTRAINED)
    world.double.end([0], code)
    assert [chunk["meta_info"]["finish_reason"] async for chunk in await task] == [reason]


async def test_a_dead_engine_ends_the_wait(world: World) -> None:
    task = await awaited(world, 1, "ab", CONSTRAINED)
    world.double.events.on_failure(EngineDeadError("scheduler", pid=1))
    with pytest.raises(EngineDeadError):
        await task


async def test_a_task_that_is_cancelled_while_it_waits_leaves_the_stream(world: World) -> None:
    task = await awaited(world, 1, "ab", CONSTRAINED)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not world.double.live)
