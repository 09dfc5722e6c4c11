"""Where calls come in: whether there is room for one, and waiting in line until there is. From any thread and loop."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from aioengine.frontend.callers import refuse_interrupting, refuse_own_thread, running_loop, this_caller
from aioengine.frontend.outputs import resolve
from aioengine.supervision.tasks import post

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from aioengine.answers import Chunk
    from aioengine.frontend.calls import Calls
    from aioengine.frontend.room import Place


class Entrance:
    """A place that was given belongs to the caller (its task, or its thread) until its next call, for a while."""

    def __init__(self, calls: Calls, lock: threading.RLock, loop: asyncio.AbstractEventLoop) -> None:
        self._calls = calls
        self._lock = lock
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def check(self) -> None:
        """Raise what a call would raise now whatever it asks for, so that nobody looks at its prompt in vain."""
        with self._lock:
            self._calls.check(this_caller())

    async def wait(self) -> None:
        """Stand in line until there is room for a call of this task. Cancelling it leaves the line.

        Raises:
            EngineError: the engine died, was shut down or is drained.
            WrongLoopError: no asyncio loop is running here.
        """
        loop = running_loop()
        future: asyncio.Future[Chunk | None] = loop.create_future()
        place = self._enter(partial(post, loop, resolve, future))
        try:
            await future
        except BaseException:
            self._leave(place)
            raise
        _raise_refusal(place)

    def wait_blocking(self) -> None:
        """The same for a thread without a loop."""
        refuse_own_thread(self._loop)
        gate = threading.Lock()
        gate.acquire()
        place = self._enter(partial(_release, gate))
        try:
            gate.acquire()
        except BaseException:
            self._leave(place)
            raise
        _raise_refusal(place)

    def _enter(self, wake: Callable[[], bool]) -> Place:
        def give() -> bool:
            post(self._loop, self._serve)  # which takes the place back where nobody uses it
            return wake()

        refuse_interrupting(self._lock)
        with self._lock:
            return self._calls.enter_line(this_caller(), give, time.monotonic())

    def _leave(self, place: Place) -> None:
        with self._lock:
            self._calls.room.leave_line(place, time.monotonic())

    def _serve(self) -> None:
        """A place that was not used goes to the next: look again when the oldest is due, until there is none.

        Timers of a loop may be some milliseconds early.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            now = time.monotonic()
            self._calls.room.serve(now)
            due_at = self._calls.room.due_at
        if due_at is not None:
            self._timer = self._loop.call_later(due_at - now, self._serve)


def _raise_refusal(place: Place) -> None:
    if place.error is not None:
        raise place.error.with_traceback(None)


def _release(gate: threading.Lock) -> bool:
    gate.release()
    return True
