"""A daemon thread that does one piece of work after another."""

from __future__ import annotations

import atexit
import contextlib
import time
import weakref
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from aioengine.supervision.tasks import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Thread

Found = TypeVar("Found")

MAX_EXIT_S = 5.0
"""The exit of the program waits so long for work that has begun, most of which is done in far less."""


class WorkerThread(Generic[Found]):
    """Runs callables in order. The threads of ``concurrent.futures`` would keep the program from exiting for as long as
    their work takes, and take no work after the main thread has ended.
    """

    def __init__(self, name: str) -> None:
        """Raises EngineStartupError: the system allows no more threads."""
        self._work: SimpleQueue[_Work[Found] | None] = SimpleQueue()
        self._is_closed = False
        _threads[start_thread(_run, self._work, name=name)] = self._work
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
_threads: weakref.WeakKeyDictionary[Thread, SimpleQueue[Any]] = weakref.WeakKeyDictionary()
"""Those that run, and their work."""


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
        if future.set_running_or_notify_cancel():
            try:
                found = call()
            except BaseException as error:  # whatever it is, it belongs to that work
                future.set_exception(error)
            else:
                future.set_result(found)
                del found
        del given, call, future  # not kept for as long as the thread waits


@atexit.register
def _join_threads() -> None:
    """Compiled code may break when the interpreter ends while it runs: let it finish, but not for long."""
    until = time.monotonic() + MAX_EXIT_S
    for thread, work in list(_threads.items()):
        _end(work)
        thread.join(max(0.0, until - time.monotonic()))
