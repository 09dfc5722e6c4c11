"""Tasks, callbacks and threads of the engine inside the program, which may cancel, close or use up anything."""

from __future__ import annotations

import _thread
import asyncio
import atexit
import contextlib
import logging
import os
import queue
import select
import socket
import subprocess
import threading
import time
import weakref
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from aioengine.errors import EngineDeadError, EngineStartupError
from aioengine.logs import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

Found = TypeVar("Found")

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 5.0
"""How long a task may take to end after it was cancelled."""

END_TIMEOUT_S: Final = 30.0
"""How long a task may take that ends by itself."""

MAX_EXIT_S = 5.0
"""The exit of the program waits so long for work that has begun, most of which is done in far less."""


_GREEN: Final = {"gevent": "gevent.monkey.patch_all", "eventlet": "eventlet.monkey_patch"}
"""Libraries that replace Python's threads and sockets by their own, with which an engine would wait for ever."""


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


def require_real_threads() -> None:
    """Check that nothing is replaced; neither library is imported.

    Raises:
        EngineStartupError: threads, queues, select, sockets or subprocesses are replaced.
    """
    replaced = {
        "threads": _thread.start_new_thread,
        "queues": queue.SimpleQueue,
        "select": select.select,
        "sockets": socket.socket,
        "subprocesses": subprocess.Popen,
    }
    homes = {name: value.__module__.partition(".")[0] for name, value in replaced.items()}
    for library, function in _GREEN.items():
        if names := [name for name, home in homes.items() if home == library]:
            raise EngineStartupError(
                f"{library} has replaced Python's {', '.join(names)} in this program ({function}), and an engine needs "
                "the real ones; run it in a process that is not patched (for example a server of its own, started by "
                f"uvicorn), or leave these out of the call of {function}"
            )


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


# ---------------------------------------------------------------- a thread for work


class WorkerThread(Generic[Found]):
    """Runs callables in order. The threads of ``concurrent.futures`` would keep the program from exiting for as long as
    their work takes, and take no work after the main thread has ended.
    """

    def __init__(self, name: str, *, max_exit_s: float | None = None) -> None:
        """``max_exit_s``: how long the exit of the program waits for work that has begun; None: ``MAX_EXIT_S``.

        Raises EngineStartupError: the system allows no more threads.
        """
        self._work: SimpleQueue[_Work[Found] | None] = SimpleQueue()
        self._is_closed = False
        _threads[start_thread(_run, self._work, name=name)] = self._work, max_exit_s
        weakref.finalize(self, self._work.put, None).atexit = False

    def submit(self, work: Callable[[], Found]) -> Future[Found]:
        """Have the thread call ``work``; after ``close`` the future is cancelled."""
        future: Future[Found] = Future()
        self._work.put((work, future))
        if self._is_closed:
            future.cancel()
        return future

    def close(self) -> None:
        """End the thread after the work that it has begun; cancel the rest."""
        self._is_closed = True
        _end(self._work)


_Work = tuple["Callable[[], Found]", Future[Found]]
_threads: weakref.WeakKeyDictionary[threading.Thread, tuple[SimpleQueue[Any], float | None]]
_threads = weakref.WeakKeyDictionary()
"""Those that run, with their work, and how long the exit waits for them."""


def _end(work: SimpleQueue[_Work[Found] | None]) -> None:
    with contextlib.suppress(Empty):
        while True:
            given = work.get_nowait()
            if given is not None:
                given[1].cancel()
    work.put(None)


def _run(work: SimpleQueue[_Work[Found] | None]) -> None:
    while (given := work.get()) is not None:
        call, future = given
        del given  # nothing is kept here when its caller goes on, nor for as long as the thread waits
        if not future.set_running_or_notify_cancel():
            del call, future
            continue
        try:
            found = call()
        except BaseException as error:  # whatever it is, it belongs to that work
            del call
            future.set_exception(error)
        else:
            del call
            future.set_result(found)
            del found
        del future


@atexit.register
def _join_threads() -> None:
    """Compiled code may break when the interpreter ends while it runs: let it finish, but not for long."""
    began_at = time.monotonic()
    for thread, (work, max_exit_s) in list(_threads.items()):
        _end(work)
        until = began_at + (MAX_EXIT_S if max_exit_s is None else max_exit_s)
        thread.join(max(0.0, until - time.monotonic()))
