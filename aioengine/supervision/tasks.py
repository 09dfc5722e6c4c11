"""Tasks, callbacks and threads of the engine inside the program, which may cancel, close or use up anything."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import TYPE_CHECKING, Final

from aioengine.errors import EngineDeadError, EngineStartupError
from aioengine.logs import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


logger = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 5.0
"""How long a task may take to end after it was cancelled."""

END_TIMEOUT_S: Final = 30.0
"""How long a task may take that ends by itself."""


def post(loop: asyncio.AbstractEventLoop, act: Callable[..., object], *arguments: object) -> bool:
    """Have ``loop`` call ``act(*arguments)`` soon, from any thread, signal handler or finalizer.

    False where the loop is closed, and everything that waits on it has ended.
    """
    try:
        loop.call_soon_threadsafe(act, *arguments)
    except RuntimeError:
        if not loop.is_closed():  # RecursionError, for example
            raise
        return False
    return True


def runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this thread is just running ``loop``."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def start_thread(target: Callable[..., object], *arguments: object, name: str) -> threading.Thread:
    """Start a daemon thread, which does not keep the program from exiting.

    Raises:
        EngineStartupError: the system allows no more threads.
    """
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise EngineStartupError(
            f"the engine needs another thread ({name}), and the system allows this program no more than its "
            f"{threading.active_count()} ({error}); raise the limit (ulimit -u, or pids.max of its control group) "
            "or run fewer threads"
        ) from error
    return thread


def require_threads(count: int) -> None:
    """Raise EngineStartupError where the system allows fewer than ``count`` more threads now."""
    is_checked = threading.Event()
    threads: list[threading.Thread] = []
    try:
        threads.extend(start_thread(is_checked.wait, name="aioengine-check") for _ in range(count))
    finally:
        is_checked.set()
        for thread in threads:
            thread.join()


class EngineTask:
    """A task that only the engine may end.

    A program can cancel every task of its loop, as ``asyncio.run`` does at its end and frameworks do at shutdown. A
    task that is cancelled like that, or that raises, is reported to ``on_failure`` on its loop, once. A normal return
    is not reported.
    """

    __slots__ = ("_is_stopping", "_on_failure", "_task")

    def __init__(
        self, coroutine: Coroutine[object, object, None], *, name: str, on_failure: Callable[[EngineDeadError], object]
    ) -> None:
        self._on_failure = on_failure
        self._is_stopping = False
        self._task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._task.add_done_callback(self._ended)

    @property
    def is_done(self) -> bool:
        return self._task.done()

    def cancel(self) -> None:
        """End the task a moment later. From any thread and finalizer; harmless when its loop is closed."""
        self._is_stopping = True
        post(self._task.get_loop(), self._task.cancel)

    async def wait(self) -> None:
        """Wait for the end of the task, and raise what it raised. Cancelling this does not cancel the task.

        Gives up after ``END_TIMEOUT_S``, with a warning in the log.
        """
        if await self._has_ended(END_TIMEOUT_S) and not self._task.cancelled():
            self._task.result()

    async def stop(self) -> None:
        """End the task and wait for its end. Gives up after ``STOP_TIMEOUT_S``, with a warning in the log."""
        self.cancel()
        await self._has_ended(STOP_TIMEOUT_S)

    async def _has_ended(self, timeout_s: float) -> bool:
        await asyncio.wait([self._task], timeout=timeout_s)
        if not self._task.done():
            warn(logger, "the engine's task %r did not end within %g s", self._task.get_name(), timeout_s)
        return self._task.done()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if self._is_stopping or not (task.cancelled() or error):
            return
        how = "was cancelled" if error is None else f"raised {error!r}"
        failure = EngineDeadError("frontend", pid=os.getpid(), reason=f"the engine's task {task.get_name()!r} {how}")
        failure.__cause__ = error
        self._on_failure(failure)
