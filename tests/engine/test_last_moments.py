"""Calls from other threads and loops while a sync engine shuts down return an answer or a clear error. None hangs."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor

import pytest

from aioengine.api.sync import Engine
from aioengine.errors import EngineClosedError, RequestError
from aioengine.frontend.portal import Portal
from aioengine.testing.fake_engine import fake_engine
from tests.kit.waiting import rapid_switches

ROUNDS = 60
LIMIT_S = 20.0
"""Longer calls fail the test."""
SHORT = {"max_new_tokens": 3}
LONG = {"max_new_tokens": 1500}


def stream(llm: Engine) -> None:
    for _ in llm.generate("a", SHORT, stream=True):
        pass


def drop(llm: Engine) -> None:
    """Drop a stream, so that its finalizer runs during the shutdown."""
    chunks = llm.generate("a", LONG, stream=True)
    next(chunks)
    del chunks
    gc.collect()


def detach(llm: Engine) -> None:
    rid = f"{random.random()}"
    with llm.generate("a", LONG, stream=True, rid=rid, resume_ttl=10) as chunks:
        next(chunks)
    next(llm.attach(rid))


def on_a_loop(call: Callable[[Engine], Coroutine[object, None, object]]) -> Callable[[Engine], object]:
    def run(llm: Engine) -> object:
        return asyncio.run(call(llm))

    return run


async def await_short(llm: Engine) -> None:
    await llm.async_generate("a", SHORT)


async def await_long(llm: Engine) -> None:
    await llm.async_generate("a", LONG)


async def iterate(llm: Engine) -> None:
    async for _ in llm.async_generate("a", SHORT, stream=True):
        pass


async def await_many(llm: Engine) -> None:
    await asyncio.gather(*(llm.async_generate("a", SHORT) for _ in range(5)))


CALLS: list[Callable[[Engine], object]] = [
    lambda llm: llm.generate("a", SHORT),
    lambda llm: llm.generate(["a"] * 20, SHORT),
    lambda llm: llm.chat([{"role": "user", "content": "a"}], SHORT),
    lambda llm: llm.flush_cache(),
    lambda llm: llm.get_server_info(),
    lambda llm: llm.pause_generation("in_place"),
    lambda llm: llm.continue_generation(),
    lambda llm: llm.admit(),
    lambda llm: llm.abort_request(abort_all=True),
    lambda llm: (llm.stats(), llm.health(), llm.is_alive, llm.get_all_child_pids()),
    lambda llm: llm.drain(0.0),
    lambda llm: llm.shutdown(),
    stream,
    drop,
    detach,
    on_a_loop(await_short),
    on_a_loop(await_long),
    on_a_loop(iterate),
    on_a_loop(await_many),
]


def result_at_shutdown(call: Callable[[Engine], object], llm: Engine, deadline: float) -> BaseException | None:
    """Repeat a call until the engine is closed. Return any other exception."""
    while time.monotonic() < deadline:
        try:
            call(llm)
        except EngineClosedError:
            return None
        except BaseException as error:
            return error
        if not llm.is_alive:
            return None
    return TimeoutError("the engine was not shut down")


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_calls_during_a_shutdown_do_not_hang(number: int) -> None:
    """The same call on two threads, and one of any other kind on a third."""
    draw = random.Random(number)
    threads = ThreadPoolExecutor(4)
    with rapid_switches():
        for _ in range(ROUNDS // 10):
            llm = fake_engine()
            deadline = time.monotonic() + LIMIT_S
            calls = [CALLS[number], CALLS[number], draw.choice(CALLS)]
            ends = [threads.submit(result_at_shutdown, call, llm, deadline) for call in calls]
            time.sleep(draw.random() * 0.01)
            threads.submit(llm.shutdown).result(LIMIT_S)
            for end in ends:
                error = end.result(LIMIT_S)
                if error is not None and "drain" not in str(error):
                    raise AssertionError(f"{error!r}") from error
    threads.shutdown(wait=False)


# ---------------------------------------------------------------- only the portal


async def nothing() -> str:
    return "done"


async def wait_forever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("make", [nothing, wait_forever])
def test_call_while_the_portal_is_closed_does_not_hang(make: Callable[[], Coroutine[object, None, object]]) -> None:
    threads = ThreadPoolExecutor(3)
    with rapid_switches():
        for number in range(ROUNDS):
            portal = Portal("test")
            portal.start()
            barrier = threading.Barrier(3)

            def call(portal: Portal = portal, barrier: threading.Barrier = barrier) -> object:
                barrier.wait()
                try:
                    while True:
                        portal.call(make())
                except EngineClosedError as error:
                    return error

            def close(portal: Portal = portal, barrier: threading.Barrier = barrier, turns: int = number * 20) -> None:
                barrier.wait()
                for _ in range(turns):
                    pass
                portal.close()

            ends = [threads.submit(work) for work in (call, call, close)]
            for end in ends[:2]:
                assert isinstance(end.result(LIMIT_S), EngineClosedError)
            ends[2].result(LIMIT_S)
    threads.shutdown(wait=False)


def test_posted_call_ends_if_the_loop_ends_first() -> None:
    """The loop ends before it runs the call."""
    portal = Portal("test")
    portal.start()
    has_begun, may_go_on = threading.Event(), threading.Event()

    def block() -> None:
        has_begun.set()
        may_go_on.wait(LIMIT_S)

    portal.loop.call_soon_threadsafe(block)
    assert has_begun.wait(LIMIT_S)
    with ThreadPoolExecutor(2) as threads:
        closing = threads.submit(portal.close)
        time.sleep(0.02)
        waiting = threads.submit(portal.call, nothing())
        time.sleep(0.02)
        may_go_on.set()
        closing.result(LIMIT_S)
        with pytest.raises(EngineClosedError):
            waiting.result(LIMIT_S)


def test_a_call_whose_portal_is_closed_from_its_own_loop_ends() -> None:
    portal = Portal("test")
    portal.start()

    async def close_and_wait() -> None:
        asyncio.get_running_loop().call_later(0.01, portal.close)
        await asyncio.Event().wait()

    with pytest.raises(EngineClosedError):
        portal.call(close_and_wait())
    with pytest.raises(EngineClosedError):
        portal.call(nothing())
    portal.close()


def test_call_cancelled_on_the_loop_raises_a_clear_error() -> None:
    portal = Portal("test")
    portal.start()

    async def cancelled() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1)

    with pytest.raises(RequestError, match="cancelled"):
        portal.call(cancelled())
    portal.close()
