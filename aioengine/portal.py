"""Portal: an event loop on a thread of its own, and calls into it from any other thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import uvloop

from aioengine.green_threads import require_real_threads
from aioengine.transport.descriptors import FOR_AN_ENGINE, hold_standard_descriptors, require_descriptors

if TYPE_CHECKING:
    from collections.abc import Coroutine

Value = TypeVar("Value")

JOIN_TIMEOUT_S = 5.0
_FOR_THE_LOOP = 8


class Portal:
    """A uvloop event loop on a daemon thread. Made running; ``close`` ends it."""

    def __init__(self, name: str) -> None:
        require_real_threads()
        require_descriptors(FOR_AN_ENGINE + _FOR_THE_LOOP)  # where it finds none, libuv aborts the program
        hold_standard_descriptors()
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether this is the portal's own thread."""
        return threading.current_thread() is self._thread

    def call(self, coroutine: Coroutine[object, None, Value], timeout_s: float | None = None) -> Value:
        """Run a coroutine on the portal's loop and wait for it, from another thread.

        An exception here (KeyboardInterrupt) cancels it, and gives it a while to clean up.

        Raises:
            RuntimeError: called from the portal's own thread, or after ``close``.
            TimeoutError: it took longer than ``timeout_s``.
        """
        if self.is_current:
            coroutine.close()
            raise RuntimeError("a call from the engine's own thread would wait for itself")
        outcome: Future[Value] = Future()
        tasks: list[asyncio.Task[Value]] = []

        def begin() -> None:
            tasks.append(self.loop.create_task(coroutine))
            tasks[0].add_done_callback(partial(_pass_on, outcome))

        def cancel() -> None:
            tasks[0].cancel()

        try:
            self.loop.call_soon_threadsafe(begin)
        except RuntimeError:
            coroutine.close()
            raise
        try:
            return outcome.result(timeout_s)
        except BaseException:
            if not outcome.done():
                self.loop.call_soon_threadsafe(cancel)
                wait([outcome], JOIN_TIMEOUT_S)
            raise

    def close(self) -> None:
        """End the loop, cancel what still runs on it, and end the thread. Harmless twice."""
        with contextlib.suppress(RuntimeError):  # closed already
            self.loop.call_soon_threadsafe(self._stopping.set)
        if not self.is_current:
            self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        await self._stopping.wait()


def _pass_on(outcome: Future[Value], task: asyncio.Task[Value]) -> None:
    """What a task ended with, for the thread that waits for it."""
    if task.cancelled():
        outcome.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())
