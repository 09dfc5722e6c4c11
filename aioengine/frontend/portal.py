"""Portal: an event loop on a thread of its own, and calls into it from any other thread."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TypeVar, cast

import uvloop

from aioengine.errors import EngineClosedError, EngineError, EngineStartupError, RequestError
from aioengine.file_descriptors import FOR_AN_ENGINE, hold_standard_descriptors, require_descriptors
from aioengine.supervision.tasks import post, require_real_threads, start_thread

Value = TypeVar("Value")

JOIN_TIMEOUT_S = 5.0
_SLICE_S = 0.5
"""A thread that waits for an outcome wakes this often, to run signal handlers."""

_FOR_THE_LOOP = 8
"""File descriptors of an event loop."""

_CANCELLED = "the call was cancelled, as all tasks of the engine's event loop were"


class _Outcome:
    """The outcome of a call, for the thread that waits for it.

    ``concurrent.futures.Future`` does not work here: a signal handler that raises in it may leave it locked for ever.
    """

    __slots__ = ("error", "is_done", "until_done", "value")

    def __init__(self) -> None:
        self.value: object = None
        self.error: BaseException | None = None
        self.is_done = False
        self.until_done = threading.Lock()  # locked until ``set``
        self.until_done.acquire()

    def set(self, value: object, error: BaseException | None = None) -> None:
        """Called once."""
        self.value, self.error, self.is_done = value, error, True
        self.until_done.release()

    def wait(self, timeout_s: float | None) -> None:
        """Wait for the outcome, for ``timeout_s`` seconds at most; None: without limit."""
        # The wait is divided: Ctrl-C may reach another thread, because the main thread blocks signals while it starts
        # a thread. This does not interrupt the main thread's wait, and the handler runs only after it.
        ends_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_done and (left_s := ends_at - time.monotonic()) > 0:
            self.until_done.acquire(timeout=min(left_s, _SLICE_S))


class Portal:
    """A uvloop event loop on a daemon thread, from ``start`` to ``close``.

    Attributes:
        _calls: the calls without an outcome, with their coroutines. The code that removes a call sets its outcome, so
            each gets exactly one, even if the loop ends before the call has begun.
    """

    def __init__(
        self, name: str, closed: Callable[[], EngineError] = EngineClosedError, on_end: Callable[[], None] | None = None
    ) -> None:
        """``closed`` returns the error of calls after the end. ``on_end`` is called after the end of the loop."""
        self._name = name
        self._closed = closed
        self._on_end = on_end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: dict[_Outcome, Coroutine[object, None, object]] = {}
        self._tasks: dict[_Outcome, asyncio.Task[object]] = {}
        self._is_closing = False
        self._is_ending = False
        self._stopping = asyncio.Event()
        self._started = _Outcome()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, which creates, runs and closes the loop.

        Raises:
            EngineStartupError: the system has too few threads or file descriptors.
        """
        require_real_threads()
        require_descriptors(FOR_AN_ENGINE + _FOR_THE_LOOP)
        hold_standard_descriptors()
        self._thread = start_thread(self._run, name=self._name)
        self._started.wait(None)
        if self._started.error is not None:
            raise self._started.error

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop, once ``start`` has returned."""
        if self._loop is None:
            raise self._closed()
        return self._loop

    @property
    def is_current(self) -> bool:
        """Whether this is the portal's own thread."""
        return threading.current_thread() is self._thread

    def call(self, coroutine: Coroutine[object, None, Value], timeout_s: float | None = None) -> Value:
        """Run a coroutine on the portal's loop and wait for it, from another thread.

        An exception while waiting (KeyboardInterrupt) cancels it; it has ``JOIN_TIMEOUT_S`` seconds to clean up.

        Raises:
            RuntimeError: called from the portal's own thread.
            EngineClosedError: the portal was closed before the coroutine ended.
            RequestError: the coroutine was cancelled on the loop.
            TimeoutError: it took longer than ``timeout_s``.
        """
        if self.is_current:
            coroutine.close()
            raise RuntimeError("a call from the engine's own thread would wait for itself")
        outcome = _Outcome()
        try:
            self._calls[outcome] = coroutine  # before the post: if the loop ends now, it refuses this call
            if not post(self.loop, self._begin, outcome):
                self._refuse(outcome)
            outcome.wait(timeout_s)
            if not outcome.is_done:
                raise TimeoutError(f"the engine's loop did not answer within {timeout_s:g} s")
        except BaseException:
            if not outcome.is_done and post(self.loop, self._cancel, outcome):
                outcome.wait(JOIN_TIMEOUT_S)
            raise
        if outcome.error is not None:
            raise outcome.error
        return cast("Value", outcome.value)

    def close(self) -> None:
        """End the loop, cancel its tasks, and end the thread. May be called twice, and before ``start``."""
        self._is_closing = True
        if self._loop is not None:
            post(self._loop, self._stopping.set)
        self.join(JOIN_TIMEOUT_S)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, for ``timeout_s`` seconds at most; does not end it."""
        if self._thread is not None and not self.is_current:
            self._thread.join(timeout_s)

    # ------------------------------------------------------------ on the portal's thread

    def _run(self) -> None:
        error: EngineStartupError | None = None
        try:
            require_descriptors(_FOR_THE_LOOP)  # without descriptors, libuv aborts the program
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except EngineStartupError as failure:
            error = failure
        finally:
            if not self._started.is_done:
                self._started.set(None, error)
            self._refuse_all()  # calls made while the loop was closing
            if self._on_end is not None:
                self._on_end()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started.set(None)
        try:
            if not self._is_closing:
                await self._stopping.wait()
        finally:
            self._is_ending = True
            self._refuse_all()

    def _begin(self, outcome: _Outcome) -> None:
        if self._is_ending:
            self._refuse(outcome)
        elif (coroutine := self._calls.get(outcome)) is not None:
            task = self._tasks[outcome] = self.loop.create_task(coroutine)
            task.add_done_callback(partial(self._pass_on, outcome))

    def _cancel(self, outcome: _Outcome) -> None:
        if (task := self._tasks.get(outcome)) is not None:
            task.cancel()
        else:
            self._refuse(outcome)  # it had not started

    def _pass_on(self, outcome: _Outcome, task: asyncio.Task[object]) -> None:
        """Give the outcome of a task to the thread that waits for it."""
        del self._tasks[outcome]
        error = task.exception() if not task.cancelled() else RequestError("control", _CANCELLED)
        if self._calls.pop(outcome, None) is None:
            return  # it was refused
        outcome.set(None if error is not None else task.result(), error)

    # ------------------------------------------------------------ from any thread

    def _refuse(self, outcome: _Outcome) -> None:
        """End the call with an error. Its task, if it has begun, is cancelled with the loop."""
        coroutine = self._calls.pop(outcome, None)
        if coroutine is None:
            return
        if outcome not in self._tasks:
            coroutine.close()
        outcome.set(None, self._closed())

    def _refuse_all(self) -> None:
        for outcome in list(self._calls):
            self._refuse(outcome)
