"""Tasks and callbacks of the engine on event loops that belong to the program, which may cancel or close anything."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from aioengine.errors import EngineDeadError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


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


class EngineTask:
    """A task that only the engine may end.

    A program can cancel every task of its loop, as ``asyncio.run`` does at its end and frameworks do at shutdown. A
    task that is cancelled like that, or that raises, is reported to ``on_failure`` on its loop, once. A normal return
    is not reported.
    """

    __slots__ = ("_is_stopping", "_on_failure", "_task")

    def __init__(
        self, coroutine: Coroutine[object, object, None], *, name: str, on_failure: Callable[[EngineDeadError], None]
    ) -> None:
        self._on_failure = on_failure
        self._is_stopping = False
        self._task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._task.add_done_callback(self._ended)

    @property
    def is_done(self) -> bool:
        return self._task.done()

    def cancel(self) -> None:
        """End the task without waiting for it. Harmless when its loop is closed."""
        self._is_stopping = True
        if not self._task.get_loop().is_closed():
            self._task.cancel()

    async def wait(self) -> None:
        """Wait for the end of the task, and raise what it raised. Cancelling this does not cancel the task."""
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def stop(self) -> None:
        """End the task and wait for its end."""
        self.cancel()
        await asyncio.wait([self._task])

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if self._is_stopping or not (task.cancelled() or error):
            return
        how = "was cancelled" if error is None else f"raised {error!r}"
        failure = EngineDeadError("frontend", pid=os.getpid(), reason=f"the engine's task {task.get_name()!r} {how}")
        failure.__cause__ = error
        self._on_failure(failure)
