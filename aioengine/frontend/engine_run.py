"""One run of an AsyncEngine: from a start to its shutdown, on one event loop, in one process."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Coroutine
from copy import copy
from typing import Any

from aioengine.frontend import callers
from aioengine.frontend.callers import running_loop
from aioengine.frontend.frontend import Frontend
from aioengine.supervision.tasks import EngineTask, runs_here


class EngineRun:
    """Belongs to the loop and the process that created it. An engine that is started again has a new run.

    Attributes:
        loop, pid: the event loop and the process to which it belongs.
        frontend: set when the start has succeeded, and kept after the shutdown.
        has_failed: the last start failed.
        is_shutting_down: a shutdown has begun; True also after its end. is_shut_down: no process is left.
    """

    def __init__(self) -> None:
        self.loop = running_loop()
        self.pid = os.getpid()
        self.frontend: Frontend | None = None
        self.has_failed = False
        self.is_shutting_down = False
        self.is_shut_down = False
        self._lock = asyncio.Lock()
        self._num_starters = 0
        self._start_task: asyncio.Task[Frontend] | None = None
        self._shutdown_task: EngineTask | None = None

    @property
    def is_in_use(self) -> bool:
        """Whether it runs or is about to: then no other run may start."""
        if self.is_shutting_down:
            return not self.is_shut_down
        return self.frontend is not None or self._num_starters > 0

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of its process."""
        return os.getpid() != self.pid

    def announce_start(self) -> None:
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

    async def start(self, start: Callable[[], Coroutine[Any, Any, Frontend]]) -> None:
        """Start the processes, unless they are started. One of several callers does it, and the others wait.

        They are killed at the end of the interpreter.

        Raises:
            EngineClosedError: ``shutdown`` was called.
            EngineError: the engine has died.
        """
        try:
            async with self._lock:
                if self.is_shutting_down:
                    raise callers.closed()
                if self.frontend is None:
                    self.frontend = await self._run_start(start)
                    _started_runs.add(self)
                elif self.frontend.failure is not None:
                    raise copy(self.frontend.failure)
        finally:
            self._num_starters -= 1

    async def _run_start(self, start: Callable[[], Coroutine[Any, Any, Frontend]]) -> Frontend:
        """Start the frontend in its own task, so that a shutdown can cancel it without cancelling the caller."""
        self.has_failed = False
        self._start_task = task = self.loop.create_task(start())
        try:
            frontend = await task
            if self.is_shutting_down:  # it succeeded although it was cancelled
                raise callers.closed()
        except BaseException as error:
            self.has_failed = True
            if task.done() and not task.cancelled() and task.exception() is None:
                await _stop_frontend(task.result())
            if isinstance(error, asyncio.CancelledError) and self.is_shutting_down and not _is_cancelled():
                raise callers.closed() from None
            raise
        finally:
            self._start_task = None
        return frontend

    def begin_shutdown(self) -> bool:
        """Begin to end the processes or the current start. Returns False on another loop."""
        if self.is_shut_down:
            return True
        if self.loop.is_closed():
            self.kill_now()
            return True
        if not runs_here(self.loop):
            return False
        self.is_shutting_down = True
        if self._shutdown_task is None:
            if self._start_task is not None:
                self._start_task.cancel()
            # If the program cancels all tasks of the loop before this task starts, ``on_failure`` ends the processes.
            self._shutdown_task = EngineTask(
                self._run_shutdown(), name="aioengine-shutdown", on_failure=lambda _: self.kill_now()
            )
        return True

    async def shutdown(self) -> None:
        """End the processes or the current start. May be called twice. Cancelling the wait does not stop the shutdown.

        Raises:
            WrongLoopError: this is another loop.
        """
        if not self.begin_shutdown():
            raise callers.wrong_loop()
        if self._shutdown_task is not None and not self.is_shut_down:
            await self._shutdown_task.wait()
            self.kill_now()  # if it did not end in time

    async def _run_shutdown(self) -> None:
        async with self._lock:
            if self.frontend is not None:
                await _stop_frontend(self.frontend)
            self.is_shut_down = True

    def kill_now(self) -> bool:
        """End the processes now, without a loop. Returns whether a started engine was ended."""
        if self.is_forked or self.is_shut_down:
            return False
        self.is_shutting_down = self.is_shut_down = True
        if self.frontend is not None:
            with contextlib.suppress(OSError):
                self.frontend.close_now()
        elif self._start_task is not None and self.loop.is_closed():
            self._start_task.get_coro().close()  # the start was in progress; it kills its processes
        return self.frontend is not None


_started_runs: weakref.WeakSet[EngineRun] = weakref.WeakSet()
"""Started runs. An engine has the only strong reference to its run. It kills the run when it is garbage-collected."""


@atexit.register
def _kill_running() -> None:
    for run in list(_started_runs):
        run.kill_now()


def _is_cancelled() -> bool:
    """Return whether the running task itself is cancelled, not only the object that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _stop_frontend(frontend: Frontend) -> None:
    try:
        await frontend.stop()
    except BaseException:  # cancelled
        frontend.close_now()
        raise
