"""Signal handlers and finalizers interrupt the engine, and exceptions interrupt calls. No call hangs or stays open."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aioengine.api import engine as engine_module
from aioengine.api import sync
from aioengine.errors import EngineError
from aioengine.frontend import callers, portal
from aioengine.frontend.calls import overload
from aioengine.frontend.calls.calls import Calls
from aioengine.frontend.calls.delivery import Delivery
from aioengine.frontend.calls.slow_readers import CHECKS_PER_TIMEOUT
from aioengine.testing.fake_engine import fake_async_engine, fake_engine
from tests.engine.engine_double import World
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from aioengine.api.answers import Chunk
    from aioengine.api.engine import AsyncEngine
    from aioengine.frontend.frontend import Frontend

GREEDY = {"temperature": 0, "max_new_tokens": 5}
LONG = {"temperature": 0, "max_new_tokens": 200}
FRONTEND = str(Path(callers.__file__).parent)
ENGINE = engine_module.__file__
SYNC = sync.__file__
PORTAL = portal.__file__


def frontend_of(engine: AsyncEngine) -> Frontend:
    return engine._frontend_here()


def is_clean(engine: AsyncEngine) -> bool:
    """Return whether no call, row, id or reserved capacity is left."""
    frontend = frontend_of(engine)
    limits = frontend.limits
    counts = (limits.num_calls, limits.num_tokens, limits.num_bytes)
    return not (frontend.calls.opened or frontend.calls.ids._owners or frontend.delivery.rows or any(counts))


# ---------------------------------------------------------------- handlers and finalizers


class Interrupt:
    """Calls ``handler`` inside a section of the engine that holds its lock, as a signal or garbage collection might."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, name: str, handler: Callable[[], object]) -> None:
        self.num_calls = 0
        self.errors: list[Exception] = []
        plain = getattr(owner, name)

        def interrupted(*arguments: object) -> object:
            try:
                self.num_calls += 1
                handler()
            except Exception as error:
                self.errors.append(error)
            return plain(*arguments)

        patch.setattr(owner, name, interrupted)


SECTIONS = pytest.mark.parametrize(("owner", "name"), [(Calls, "open"), (Delivery, "_put")])


@SECTIONS
async def test_signal_handler_can_end_and_watch_requests(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_async_engine() as engine:
        victim = engine.async_generate("b", {"max_new_tokens": 2000}, stream=True)
        others = [engine.async_generate("c", {"max_new_tokens": 2000}, stream=True) for _ in range(2)]
        seen: list[str] = []

        def handler() -> None:
            engine.abort_request("nobody")
            engine.abort_request(victim.rid)
            others[0].abort()
            others[1].close()
            assert engine.is_alive
            assert engine.tokenizer.encode("a") == [97]
            seen.append(engine.health()["state"] + str(engine.stats()["num_running"] >= 0))

        interrupt = Interrupt(monkeypatch, owner, name, handler)
        assert len((await engine.async_generate("a", GREEDY))["output_ids"]) == 5
        for aborted in (victim, others[0]):
            assert [chunk async for chunk in aborted][-1]["meta_info"]["finish_reason"] == "abort"
        assert [chunk async for chunk in others[1]] == []
        await until(lambda: engine.stats()["num_streams"] == 0)
        assert interrupt.num_calls > 0
        assert interrupt.errors == []
        assert set(seen) == {"runningTrue"}


@SECTIONS
async def test_a_stream_can_be_dropped_by_garbage_collection_anywhere(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_async_engine() as engine:

        async def wait_forever() -> None:
            await asyncio.create_task(asyncio.sleep(1000))

        async def read() -> None:
            async for _ in engine.async_generate("b", {"max_new_tokens": 2000}, stream=True):
                await asyncio.get_running_loop().create_future()

        async def read_whole() -> None:
            await engine.async_generate("b", {"max_new_tokens": 2000})

        abandoned = []
        for read_one in (read, read_whole):
            coroutine = read_one()
            coroutine.send(None)
            abandoned.append(coroutine)

        def handler() -> None:
            if abandoned:
                abandoned.clear()
                gc.collect()

        interrupt = Interrupt(monkeypatch, owner, name, handler)
        await engine.async_generate("a", GREEDY)
        await until(lambda: is_clean(engine))
        assert interrupt.num_calls > 0


def test_a_blocking_call_on_the_engine_s_own_thread_is_refused() -> None:
    with fake_engine() as engine:
        loop = engine._portal.loop
        stream = engine.generate("c", GREEDY | {"max_new_tokens": 1500}, stream=True)
        engine.generate("d", GREEDY | {"max_new_tokens": 1500}, stream=True, rid="d", resume_ttl=60).close()
        refused: list[str] = []

        def callback() -> None:
            for call in (
                lambda: engine.generate("b", GREEDY), lambda: engine.chat([{"role": "user", "content": "b"}], GREEDY),
                lambda: list(engine.generate("b", GREEDY, stream=True)), lambda: list(stream),
                lambda: list(engine.attach("d")), engine.flush_cache, engine.admit,
            ):  # fmt: skip
                try:
                    call()
                except RuntimeError as error:
                    refused.append(str(error))
            engine.abort_request(abort_all=True)
            is_done.set()

        is_done = threading.Event()
        loop.call_soon_threadsafe(callback)
        assert is_done.wait(20)
        assert len(refused) == 7
        assert all("from the engine's own thread would wait for itself" in text for text in refused)
        assert len(engine.generate("a", GREEDY)["output_ids"]) == 5


async def test_abort_does_not_affect_requests_created_later() -> None:
    async with fake_async_engine() as engine:
        first = engine.async_generate("a", GREEDY, stream=True, rid="x")
        engine.abort_request("x")
        engine.abort_request(abort_all=True)
        await first.aclose()
        second = engine.async_generate("a", GREEDY, rid="x")
        third = engine.async_generate("b", GREEDY)
        reasons = [(await generation)["meta_info"]["finish_reason"] for generation in (second, third)]
        assert reasons == ["length", "length"]


# ---------------------------------------------------------------- calls that fail half-way


class RaiseAtCall:
    """Raises KeyboardInterrupt at the ``count``-th begin or end of a function call in the engine's code on this thread.

    Python runs signal handlers at these places, and in loops.
    """

    def __init__(self, count: int, *files: str, again_after: int = 0) -> None:
        """``files``: files or folders of the code, by default those of a call.

        ``again_after``: number of places after which it is raised a second time.
        """
        self.is_raised = False
        self.is_raised_again = False
        self._left = count
        self._again_after = again_after
        self._files = files or (FRONTEND, ENGINE)
        self._function = self._profile  # Python may call it once more after it dropped its own reference

    def __enter__(self) -> RaiseAtCall:
        sys.setprofile(self._function)
        if self._again_after:
            sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        if self._again_after:
            sys.settrace(None)

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        is_handed_over = (
            event == "return" and frame.f_code.co_name == "__next__"
        )  # a for loop does not check for signals there
        if event != "c_call" and not is_handed_over and frame.f_code.co_filename.startswith(self._files):
            self._left -= 1
            if self._left == 0:
                self.is_raised = True
                raise KeyboardInterrupt

    def _trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., object] | None:
        """Raise again. Python removes the profile function after it has raised, but not the trace function."""
        if self.is_raised and event in ("call", "return") and frame.f_code.co_filename.startswith(self._files):
            self._again_after -= 1
            if self._again_after == 0:
                self.is_raised_again = True
                raise KeyboardInterrupt
        return self._trace


OPTIONS: list[dict[str, object]] = [
    {"input_ids": [1, 2, 3], "rid": "x"},
    {"prompt": "abc", "timeout": 60},
    {"input_ids": [[1, 2], [3, 4]], "sampling_params": {"n": 2, "max_new_tokens": 5}},
    {"input_ids": [1, 2, 3], "rid": "x", "resume_ttl": 0.01, "stream": True},
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("options", OPTIONS)
async def test_an_exception_anywhere_in_a_call_leaves_nothing_open(options: dict[str, object]) -> None:
    world = World()
    async with world.engine as engine:
        world.double.is_held = True
        num_places = 0
        while True:
            num_places, kept = num_places + 1, None
            with RaiseAtCall(num_places) as injected, contextlib.suppress(KeyboardInterrupt):
                kept = engine.async_generate(**options)  # type: ignore[call-overload]
            if kept is not None:  # nothing was raised in the last round, and Python ignores exceptions in finalizers
                kept.close()
            for _ in range(5):
                await asyncio.sleep(0)
            await until(lambda: is_clean(engine))
            if not injected.is_raised:
                break
        assert num_places > 50


def test_an_exception_anywhere_in_reading_ends_the_stream_or_loses_nothing() -> None:
    with fake_engine() as engine:
        expected = engine.generate("a", LONG)["text"]  # type: ignore[call-overload,index]
        num_places = num_left = 0
        is_raised = True
        while is_raised:
            num_places += 1
            stream = engine.generate("a", LONG, stream=True)
            chunks: list[Chunk] = []
            with RaiseAtCall(num_places, FRONTEND, SYNC) as injected, contextlib.suppress(KeyboardInterrupt):
                for chunk in stream:
                    chunks.append(chunk)
                    if len(chunks) == 2:
                        break
            is_raised = injected.is_raised
            if stream._reader.state == "left":
                num_left += 1
            else:
                assert "".join(chunk["text"] for chunk in [*chunks, *stream]) == expected
        assert num_left > 5
        assert num_places > 20


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised in our finalizer
def test_exception_anywhere_in_admit_loses_no_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "RESERVED_S", 0.02)
    with fake_engine(max_running=1, max_queued=0) as engine:
        limits = engine._frontend_here().limits
        num_places, is_raised = 0, True
        while is_raised:
            num_places += 1
            with RaiseAtCall(num_places, FRONTEND, SYNC) as injected, contextlib.suppress(KeyboardInterrupt):
                engine.admit()
                engine.generate("a", GREEDY)
            is_raised = injected.is_raised
            engine.admit()
            engine.generate("a", GREEDY)
            assert len(limits._queue) == 0
        assert num_places > 50
        assert engine.drain(20)
        assert (limits.num_calls, limits.num_tokens, limits.num_bytes, limits.due_at) == (0, 0, 0, None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a coroutine that was never started
def test_next_control_call_works_after_an_exception_anywhere_in_one() -> None:
    with fake_engine() as engine:
        num_places, is_raised = 0, True
        while is_raised:
            num_places += 1
            with RaiseAtCall(num_places, PORTAL) as injected, contextlib.suppress(KeyboardInterrupt):
                engine.flush_cache()
            is_raised = injected.is_raised
            assert engine.flush_cache()
            assert engine._portal._calls == {}
        assert num_places > 5


# ---------------------------------------------------------------- slow readers


async def test_a_reader_that_reads_while_it_is_suspended_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader on another thread takes the last unread row between the check and the suspension."""
    with fake_engine(slow_reader="pause", slow_reader_timeout_s=1000.0, step_time_s=0.001) as engine:
        expected = engine.generate("a", LONG)["text"]  # type: ignore[call-overload,index]
        frontend = engine._frontend_here()
        stream = engine.generate("a", LONG, stream=True)
        chunks = [next(stream)]
        slow_readers, is_taken, plain = frontend._slow_readers, threading.Event(), frontend.calls.suspend

        def suspend(call: object, place: object) -> None:
            chunks.append(next(stream))
            is_taken.set()
            plain(call, place)  # type: ignore[arg-type]

        def look() -> None:
            for _ in range(CHECKS_PER_TIMEOUT + 1):
                slow_readers._check()

        monkeypatch.setattr(frontend.calls, "suspend", suspend)
        [call] = frontend.calls.opened
        await until(lambda: call.read_position is not None)
        frontend.loop.call_soon_threadsafe(look)
        await asyncio.to_thread(is_taken.wait, 5)
        reading = asyncio.create_task(asyncio.to_thread(lambda: chunks.extend(stream)))
        async with asyncio.timeout(20):
            await reading
        assert is_taken.is_set()
        assert "".join(chunk["text"] for chunk in chunks) == expected


async def test_only_errors_of_a_closed_loop_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_async_engine() as engine:
        stream = engine.async_generate("a", GREEDY, stream=True)

        def fail(*_: object) -> None:
            raise RecursionError

        with monkeypatch.context() as patch:
            patch.setattr(frontend_of(engine), "loop", _Loop(fail))
            with pytest.raises(RecursionError):
                stream.abort()
    with pytest.raises(EngineError):
        engine.abort_request("x")


class _Loop:
    def __init__(self, call_soon_threadsafe: Callable[..., None]) -> None:
        self.call_soon_threadsafe = call_soon_threadsafe

    def is_closed(self) -> bool:
        return False
