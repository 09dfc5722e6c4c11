"""Tasks, callbacks and threads of the engine inside the user's program.

The program may cancel tasks, close event loops, and use up threads.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

from aioengine.errors import EngineDeadError, EngineStartupError
from aioengine.logs import warn

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 5.0
"""Maximum time from the cancellation of a task to its end."""

END_TIMEOUT_S: Final = 30.0
"""Maximum time that ``EngineTask.wait`` waits."""

MAX_EXIT_S = 5.0
"""Maximum time that the exit of the program waits for work in progress. Most work takes far less."""


def post(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object) -> bool:
    """Schedule ``callback(*arguments)`` on ``loop``, from any thread, signal handler or finalizer.

    Return False if the loop is closed. Then all its tasks have ended.
    """
    try:
        loop.call_soon_threadsafe(callback, *arguments)
    except RuntimeError:
        if not loop.is_closed():  # RecursionError, for example
            raise
        return False
    return True


def resolve(waiter: asyncio.Future[Any]) -> None:
    """Wake ``waiter`` with None, unless it was cancelled. In the thread of its loop."""
    if not waiter.done():
        waiter.set_result(None)


def runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether this thread is running ``loop`` now."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def require_real_threads() -> None:
    """Raise EngineStartupError if gevent or eventlet has replaced Python's threads: the engine would wait forever."""
    library = _thread.start_new_thread.__module__.partition(".")[0]
    if library in ("gevent", "eventlet"):
        raise EngineStartupError(f"{library} has replaced Python's threads; start the engine in a process without it")


def start_thread(target: Callable[..., object], *arguments: object, name: str) -> threading.Thread:
    """Start a daemon thread. Daemon threads do not keep the program from exiting.

    Raises:
        EngineStartupError: the system allows no more threads.
    """
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        text = f"the engine needs another thread ({name}): raise its limit (ulimit -u, or pids.max of the cgroup)"
        raise EngineStartupError(text) from error
    return thread


def require_threads(count: int) -> None:
    """Raise EngineStartupError if the system allows fewer than ``count`` more threads now."""
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

    ``asyncio.run`` and frameworks cancel all tasks of a loop at shutdown. If the program cancels the task, or the task
    raises, ``on_failure`` is called once on its loop. A normal return is not reported.
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
        """Cancel the task soon. May be called from any thread or finalizer. Does nothing if its loop is closed."""
        self._is_stopping = True
        post(self._task.get_loop(), self._task.cancel)

    async def wait(self) -> None:
        """Wait for the end of the task, and raise its exception. Cancelling the wait does not cancel the task.

        After ``END_TIMEOUT_S``, log a warning and return.
        """
        if await self._has_ended(END_TIMEOUT_S) and not self._task.cancelled():
            self._task.result()

    async def stop(self) -> None:
        """Cancel the task and wait for its end. After ``STOP_TIMEOUT_S``, log a warning and return."""
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


class WorkerThread(Generic[Result]):
    """Runs callables in order.

    A thread of ``concurrent.futures`` delays the exit of the program until its work is done. It also accepts no work
    after the main thread has ended.
    """

    def __init__(self, name: str, *, max_exit_s: float | None = None) -> None:
        """max_exit_s: how long the exit of the program waits for work in progress; None: ``MAX_EXIT_S``.

        Raises EngineStartupError: the system allows no more threads.
        """
        self._work: SimpleQueue[_Work[Result] | None] = SimpleQueue()
        self._is_closed = False
        _threads[start_thread(_run, self._work, name=name)] = self._work, max_exit_s
        weakref.finalize(self, self._work.put, None).atexit = False

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Call ``work`` in the thread. After ``close``, the future is cancelled."""
        future: Future[Result] = Future()
        self._work.put((work, future))
        if self._is_closed:
            future.cancel()
        return future

    def close(self) -> None:
        """End the thread after its work in progress, and cancel all other work."""
        self._is_closed = True
        _end(self._work)


async def in_thread(work: Callable[[], Result]) -> Result:
    """Run ``work`` in its own thread. The exit of the program hardly waits for it, because file systems may hang."""
    thread = WorkerThread[Result]("aioengine-files", max_exit_s=0.5)
    try:
        return await asyncio.wrap_future(thread.submit(work))
    finally:
        thread.close()


_Work = tuple["Callable[[], Result]", Future[Result]]
_threads: weakref.WeakKeyDictionary[threading.Thread, tuple[SimpleQueue[Any], float | None]]
_threads = weakref.WeakKeyDictionary()
"""Running threads, with their work and ``max_exit_s``."""


def _end(work: SimpleQueue[_Work[Result] | None]) -> None:
    with contextlib.suppress(Empty):
        while True:
            item = work.get_nowait()
            if item is not None:
                item[1].cancel()
    work.put(None)


def _run(work: SimpleQueue[_Work[Result] | None]) -> None:
    while _do(work.get()):
        pass


def _do(item: _Work[Result] | None) -> bool:
    """Do one item of work; False: there is no more. A function, so that the thread keeps no reference to the work."""
    if item is None:
        return False
    call, future = item
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:  # the waiting caller handles it
            future.set_exception(error)
    return True


@atexit.register
def _join_threads() -> None:
    """Wait a limited time for work in progress: compiled code may crash if the interpreter exits while it runs."""
    began_at = time.monotonic()
    for thread, (work, max_exit_s) in list(_threads.items()):
        _end(work)
        until = began_at + (MAX_EXIT_S if max_exit_s is None else max_exit_s)
        thread.join(max(0.0, until - time.monotonic()))
