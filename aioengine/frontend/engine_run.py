"""One run of an AsyncEngine: from a start to its shutdown, on one event loop, in one process."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import weakref
from copy import copy
from typing import TYPE_CHECKING

from aioengine.frontend import callers
from aioengine.frontend.callers import running_loop
from aioengine.frontend.startup import start_frontend
from aioengine.supervision.tasks import EngineTask, runs_here

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioengine.frontend.engine_parts import Blueprint
    from aioengine.frontend.frontend import Frontend


class EngineRun:
    """Belongs to the loop and the process that created it. An engine that is started again has a new run.

    Attributes:
        loop, pid: the event loop and the process to which it belongs.
        frontend: set when the start has succeeded, and kept after the shutdown.
        has_failed: the last start failed.
        is_ended: a shutdown has started. is_over: it is complete, and no process is left.
    """

    def __init__(self) -> None:
        self.loop = running_loop()
        self.pid = os.getpid()
        self.frontend: Frontend | None = None
        self.has_failed = False
        self.is_ended = False
        self.is_over = False
        self._lock = asyncio.Lock()
        self._num_starters = 0
        self._start: asyncio.Task[Frontend] | None = None
        self._end: EngineTask | None = None

    @property
    def is_in_use(self) -> bool:
        """Whether it runs or is about to: then no other run may start."""
        if self.is_ended:
            return not self.is_over
        return self.frontend is not None or self._num_starters > 0

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of its process."""
        return os.getpid() != self.pid

    def join(self) -> None:
        """Announce a call of ``start``, which must follow.

        Raises:
            EngineClosedError: this process is a fork.
            WrongLoopError: this is another loop.
        """
        if self.is_forked:
            raise callers.forked(self.pid)
        if not runs_here(self.loop):
            raise callers.wrong_loop()
        self._num_starters += 1

    async def start(self, prepare: Callable[[], Blueprint], progress: bool | None) -> None:
        """Start the processes, unless they are started. One of several callers does it, and the others wait.

        They are killed at the end of the interpreter.

        Raises:
            EngineClosedError: ``end`` was called.
            EngineError: the engine has died.
        """
        try:
            async with self._lock:
                if self.is_ended:
                    raise callers.closed()
                if self.frontend is None:
                    self.frontend = await self._started(prepare, progress)
                    _started_runs.add(self)
                elif self.frontend.failure is not None:
                    raise copy(self.frontend.failure)
        finally:
            self._num_starters -= 1

    async def _started(self, prepare: Callable[[], Blueprint], progress: bool | None) -> Frontend:
        """Runs in its own task, which a shutdown can cancel without cancelling the caller."""
        self.has_failed = False
        self._start = task = self.loop.create_task(start_frontend(prepare, progress))
        try:
            frontend = await task
            if self.is_ended:  # it succeeded although it was cancelled
                raise callers.closed()
        except BaseException as error:
            self.has_failed = True
            if task.done() and not task.cancelled() and task.exception() is None:
                await _stop(task.result())
            if isinstance(error, asyncio.CancelledError) and self.is_ended and not _is_cancelled():
                raise callers.closed() from None
            raise
        finally:
            self._start = None
        return frontend

    def start_end(self) -> bool:
        """Begin to end the processes or the current start. Returns False on another loop."""
        if self.is_over:
            return True
        if self.loop.is_closed():
            self.kill_now()
            return True
        if not runs_here(self.loop):
            return False
        self.is_ended = True
        if self._end is None:
            if self._start is not None:
                self._start.cancel()
            # If the program cancels all tasks of the loop before this task starts, ``on_failure`` ends the processes.
            self._end = EngineTask(self._stop(), name="aioengine-shutdown", on_failure=lambda _: self.kill_now())
        return True

    async def end(self) -> None:
        """End the processes or the current start. May be called twice; cancelling the wait does not stop it.

        Raises:
            WrongLoopError: this is another loop.
        """
        if not self.start_end() and not runs_here(self.loop):
            raise callers.wrong_loop()
        if self._end is not None and not self.is_over:
            await self._end.wait()
            self.kill_now()  # if it did not end in time

    async def _stop(self) -> None:
        async with self._lock:
            if self.frontend is not None:
                await _stop(self.frontend)
            self.is_over = True

    def kill_now(self) -> bool:
        """End the processes now, without a loop. Returns False in a fork, and if no process runs."""
        if self.is_forked or self.is_over:
            return False
        self.is_ended = self.is_over = True
        if self.frontend is not None:
            with contextlib.suppress(OSError):
                self.frontend.close_now()
        elif self._start is not None and self.loop.is_closed():
            self._start.get_coro().close()  # the start was in progress; it kills its processes
        return self.frontend is not None


_started_runs: weakref.WeakSet[EngineRun] = weakref.WeakSet()
"""Started runs. Only its engine keeps a run alive, and kills it when the engine is garbage-collected."""


@atexit.register
def _kill_running() -> None:
    for run in list(_started_runs):
        run.kill_now()


def _is_cancelled() -> bool:
    """Return whether the running task itself is cancelled, not only the object that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _stop(frontend: Frontend) -> None:
    try:
        await frontend.stop()
    except BaseException:  # cancelled
        frontend.close_now()
        raise
