"""Portal: an event loop on a thread of its own, and calls into it from any other thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, TypeVar

import uvloop

if TYPE_CHECKING:
    from collections.abc import Coroutine

Value = TypeVar("Value")

JOIN_TIMEOUT_S = 5.0


class Portal:
    """A uvloop event loop on a daemon thread. Made running; ``close`` ends it."""

    def __init__(self, name: str) -> None:
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

        An exception here (KeyboardInterrupt) cancels it.

        Raises:
            RuntimeError: called from the portal's own thread, or after ``close``.
            TimeoutError: it took longer than ``timeout_s``.
        """
        if self.is_current:
            coroutine.close()
            raise RuntimeError("a call from the engine's own thread would wait for itself")
        try:
            work = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError:
            coroutine.close()
            raise
        try:
            return work.result(timeout_s)
        except BaseException:
            work.cancel()
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
