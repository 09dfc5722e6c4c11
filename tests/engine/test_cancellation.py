"""Calls are cancelled in all ways at each callback of the loop. Nothing may be left in any part of the engine.

Frontend, scheduler, detokenizer and a fake model run on one loop, which cancels just before its k-th callback.
Each program is run for k = 1, 2, 3, ... until it ends before its k-th callback.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest

from aioengine.api.engine import AsyncEngine
from aioengine.errors import EngineClosedError, EngineError
from aioengine.frontend.calls.call import Call, CallRow
from aioengine.testing.fake_engine import fake_async_engine
from tests.kit.grids import grid
from tests.kit.waiting import until

SHORT = {"max_new_tokens": 12, "temperature": 0}
LONG = {"max_new_tokens": 1500, "temperature": 0}
IDLE = {"num_running": 0, "num_waiting": 0, "num_streams": 0, "num_detokenizing": 0}
MAX_STEPS = 2000

Program = Callable[[AsyncEngine], Awaitable[object]]


class SteppedLoop(asyncio.SelectorEventLoop):
    """Calls ``function`` just before the k-th callback after ``arm``."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.errors.append(context))
        self._left = 0
        self._function: Callable[[], object] = list

    def arm(self, step: int, function: Callable[[], object]) -> None:
        self._left, self._function = step, function

    def disarm(self) -> bool:
        """Return whether the function was called."""
        was_called = self._left <= 0
        self._left = 0
        return was_called

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return super().call_soon(self._step, callback, args, context=context)

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return super().call_soon_threadsafe(self._step, callback, args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return super().call_at(when, self._step, callback, args, context=context)

    def _step(self, callback: Any, args: tuple[Any, ...]) -> None:
        if self._left > 0:
            self._left -= 1
            if self._left == 0:
                self._function()
        callback(*args)


def run(main: Callable[[SteppedLoop], Awaitable[None]]) -> None:
    loop = SteppedLoop()

    async def outer() -> None:
        await main(loop)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(outer())
    assert loop.errors == []


# ---------------------------------------------------------------- interrupted programs


async def whole(engine: AsyncEngine) -> None:
    await engine.async_generate("the quick brown fox", SHORT)


async def batch(engine: AsyncEngine) -> None:
    await engine.async_generate(input_ids=[[1] * 40, [2] * 40], sampling_params={**SHORT, "n": 2})


async def streaming(engine: AsyncEngine) -> None:
    async for _ in engine.async_generate(input_ids=[1] * 700, sampling_params=SHORT, stream=True):
        pass


async def awaited_stream(engine: AsyncEngine) -> None:
    stream = await engine.async_generate(["a", "b"], SHORT, stream=True)
    async with stream:
        async for _ in stream:
            await asyncio.sleep(0)


async def aborted(engine: AsyncEngine) -> None:
    stream = engine.async_generate(input_ids=[3] * 40, sampling_params=LONG, stream=True)
    await anext(stream)
    stream.abort()
    async for _ in stream:
        pass


async def closed(engine: AsyncEngine) -> None:
    stream = engine.async_generate(input_ids=[4] * 40, sampling_params=LONG, stream=True)
    await anext(stream)
    await stream.aclose()
    await asyncio.sleep(0)


async def preempting(engine: AsyncEngine) -> None:
    """Requests exceed the pool, so that some wait and some are preempted."""
    params = {"max_new_tokens": 18, "temperature": 0}
    prompts = [[number] * 180 for number in range(11)]
    await asyncio.gather(*(engine.async_generate(input_ids=prompt, sampling_params=params) for prompt in prompts))


async def a_task(engine: AsyncEngine) -> None:
    await asyncio.create_task(engine.async_generate(input_ids=[5] * 40, sampling_params=SHORT))


async def timed(engine: AsyncEngine) -> None:
    await engine.async_generate(input_ids=[6] * 40, sampling_params=LONG, timeout=0.002, queue_timeout=0.001)


async def orders(engine: AsyncEngine) -> None:
    await engine.get_server_info()
    await engine.flush_cache()


PROGRAMS = [whole, batch, streaming, awaited_stream, aborted, closed, preempting, a_task, timed, orders]


# ---------------------------------------------------------------- kinds of interruptions


async def by_cancel(loop: SteppedLoop, step: int, program: Awaitable[object]) -> None:
    task = asyncio.ensure_future(program)
    loop.arm(step, task.cancel)
    with suppress(asyncio.CancelledError):
        await task


async def by_timeout(loop: SteppedLoop, step: int, program: Awaitable[object]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(60) as scope:
            loop.arm(step, lambda: None if scope.expired() else scope.reschedule(0))
            await program


async def by_scope(loop: SteppedLoop, step: int, program: Awaitable[object]) -> None:
    with anyio.CancelScope() as scope:
        loop.arm(step, scope.cancel)
        await program


async def by_group(loop: SteppedLoop, step: int, program: Awaitable[object]) -> None:
    """A sibling in the same task group fails."""
    failing: asyncio.Future[None] = loop.create_future()
    loop.arm(step, lambda: failing.done() or failing.set_exception(ZeroDivisionError()))

    async def sibling() -> None:
        await failing

    with suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            other = group.create_task(sibling())
            await program
            other.cancel()
    if failing.done() and not failing.cancelled():
        failing.exception()  # retrieved, also if the sibling has already ended


WAYS = [by_cancel, by_timeout, by_scope, by_group]


async def assert_nothing_is_left(engine: AsyncEngine) -> None:
    def is_idle() -> bool:
        stats = engine.stats()
        return all(stats[name] == 0 for name in IDLE) and stats["num_free_pages"] == stats["num_pages"]

    await asyncio.sleep(0)
    # The scheduler answers in order. When it answers this, it has handled all aborts.
    [server_info] = (await engine.get_server_info())["internal_states"]
    assert (server_info["num_running"], server_info["num_waiting"]) == (0, 0)
    await until(is_idle)


@pytest.mark.parametrize(("program", "way"), grid([(program,) for program in PROGRAMS], [(way,) for way in WAYS]))
def test_call_cancelled_at_any_callback_leaves_nothing(program: Program, way: Callable[..., Awaitable[None]]) -> None:
    async def main(loop: SteppedLoop) -> None:
        async with fake_async_engine(num_pages=128) as engine:
            expected = await engine.async_generate("afterwards", SHORT)
            for step in itertools.count(1):
                assert step < MAX_STEPS
                await way(loop, step, program(engine))
                was_interrupted = loop.disarm()
                await assert_nothing_is_left(engine)
                if not was_interrupted:
                    break
            assert step > 5 or program is timed  # its timeout may pass before it starts
            assert (engine.stats()["num_preemptions"] > 0) is (program is preempting)
            assert (await engine.async_generate("afterwards", SHORT))["text"] == expected["text"]
        gc.collect()
        gc.collect()  # some objects with finalizers are freed by the second collection
        assert [thing for thing in gc.get_objects() if type(thing) in (Call, CallRow)] == []

    run(main)


@pytest.mark.parametrize("is_read", [False, True])
def test_stream_dropped_at_any_callback_leaves_nothing(is_read: bool) -> None:
    async def main(loop: SteppedLoop) -> None:
        async with fake_async_engine() as engine:
            for step in itertools.count(1):
                assert step < MAX_STEPS
                held = [engine.async_generate(input_ids=[7] * 40, sampling_params=SHORT, stream=True)]
                loop.arm(step, held.clear)
                if is_read:
                    with suppress(IndexError):
                        while await anext(held[0], None) is not None:  # noqa: ASYNC110
                            await asyncio.sleep(0)
                for _ in range(40):
                    await asyncio.sleep(0)
                was_dropped = loop.disarm()
                held.clear()
                await assert_nothing_is_left(engine)
                if not was_dropped:
                    break

    run(main)


# ---------------------------------------------------------------- start and shutdown


async def start_and_stop(engine: AsyncEngine) -> None:
    async with engine:
        await engine.async_generate("a", SHORT)


async def stop_while_it_works(engine: AsyncEngine) -> None:
    await engine.start()
    waiting = engine.async_generate("a", LONG)
    await asyncio.sleep(0)
    await engine.shutdown()
    with suppress(EngineClosedError):
        await waiting


async def drain_while_it_works(engine: AsyncEngine) -> None:
    await engine.start()
    waiting = engine.async_generate("a", LONG)
    await asyncio.sleep(0)
    await engine.drain(0.001)
    await waiting
    await engine.shutdown()


@pytest.mark.parametrize("program", [start_and_stop, stop_while_it_works, drain_while_it_works])
def test_start_and_shutdown_can_be_cancelled_at_any_callback(program: Program) -> None:
    """After an interrupted start the engine can be started again. It can always be shut down, and leaves no task."""

    async def main(loop: SteppedLoop) -> None:
        for step in itertools.count(1):
            assert step < MAX_STEPS
            engine = fake_async_engine()
            await by_cancel(loop, step, program(engine))
            was_interrupted = loop.disarm()
            with suppress(EngineClosedError):
                await engine.start()
                with suppress(EngineError):  # the engine was drained
                    assert (await engine.async_generate("a", SHORT))["text"]
            await engine.shutdown()
            assert engine.health()["state"] == "closed"
            await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
            if not was_interrupted:
                break

    run(main)
