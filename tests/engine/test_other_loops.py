"""Awaiting an engine under trio raises a clear error, and nothing keeps running."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest
import trio

from aioengine.api.engine import AsyncEngine
from aioengine.api.sync import Engine
from aioengine.errors import WrongLoopError
from aioengine.testing.fake_engine import fake_async_engine, fake_engine
from tests.engine.engine_double import World, expected_text
from tests.engine.test_sync import SyncWorld

GREEDY = {"temperature": 0, "max_new_tokens": 6}
LONG = {"temperature": 0, "max_new_tokens": 400}


@pytest.fixture
def sync_world() -> SyncWorld:
    return SyncWorld()


async def start(engine: AsyncEngine) -> None:
    await engine.start()


async def enter(engine: AsyncEngine) -> None:
    async with engine:
        pass


@pytest.mark.parametrize("begin", [start, enter])
def test_an_async_engine_does_not_start_under_trio(begin: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    here = World()
    with pytest.raises(WrongLoopError, match="asyncio"):
        trio.run(begin, here.engine)
    assert here.doubles == []
    assert here.engine.health()["state"] == "starting"
    asyncio.run(enter(here.engine))


def test_a_started_async_engine_refuses_calls_under_trio() -> None:
    here = World()

    async def call() -> None:
        await here.engine.async_generate("a", LONG)

    async def main() -> None:
        async with here.engine:
            with pytest.raises(WrongLoopError, match="asyncio"):
                await asyncio.to_thread(trio.run, call)
            assert here.engine.stats()["num_streams"] == 0

    asyncio.run(main())


async def await_answer(engine: Engine) -> None:
    await engine.async_generate("a", LONG)


async def await_stream(engine: Engine) -> None:
    await engine.async_generate("a", LONG, stream=True)


async def iterate_stream(engine: Engine) -> None:
    async for _ in engine.async_generate("a", LONG, stream=True):
        pass


async def run_generation(engine: Engine) -> None:
    """Run a generation as trio runs a coroutine."""
    engine.async_generate("a", LONG).send(None)


class TestEngine:
    @pytest.mark.parametrize("call", [await_answer, await_stream, iterate_stream, run_generation])
    def test_awaiting_a_call_under_trio_is_refused(
        self, sync_world: SyncWorld, call: Callable[[Engine], Awaitable[None]]
    ) -> None:
        with sync_world.engine as engine:
            sync_world.double.is_held = True
            with pytest.raises(WrongLoopError, match="asyncio") as caught:
                trio.run(call, engine)
            deadline = time.monotonic() + 30
            while engine.stats()["num_streams"] or sync_world.double.live:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            del caught  # it held the frames of the call

    def test_the_synchronous_methods_work_in_a_thread_of_trio(self, sync_world: SyncWorld) -> None:
        with sync_world.engine as engine:
            answer = trio.run(trio.to_thread.run_sync, engine.generate, "a", GREEDY)
            assert answer["text"] == expected_text("a", 6)


@asynccontextmanager
async def started() -> AsyncIterator[AsyncEngine]:
    async with fake_async_engine({"": "Paris."}) as engine:
        yield engine


def test_anyio_on_asyncio_works() -> None:
    texts: list[str] = []

    async def ask(engine: AsyncEngine) -> None:
        with anyio.fail_after(10):
            texts.append((await engine.async_generate("a"))["text"])
            texts.append("".join([chunk["text"] async for chunk in engine.async_generate("a", stream=True)]))

    async def main() -> None:
        async with started() as engine, anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(ask, engine)

    anyio.run(main, backend="asyncio")
    assert texts == ["Paris."] * 4


def test_anyio_on_trio_is_refused() -> None:
    async def main() -> None:
        with fake_engine({"": "Paris."}) as engine:
            await engine.async_generate("a")

    with pytest.raises(WrongLoopError, match="asyncio"):
        anyio.run(main, backend="trio")
