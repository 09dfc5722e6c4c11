"""Overload: the limits on what waits, and the queue of callers that wait until a call fits.

A call reserves its part of the limits once, before anything looks at its arguments; it keeps it until it is closed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Final

from aioengine.errors import EngineOverloadedError, RequestTooLargeError
from aioengine.frontend.callers import refuse_interrupting, refuse_own_thread, running_loop, this_caller
from aioengine.frontend.calls.reader import resolve
from aioengine.supervision.tasks import post

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Hashable

    from aioengine.api.answers import Chunk
    from aioengine.errors import EngineError
    from aioengine.frontend.calls.call import Call, CallRow
    from aioengine.settings.config import QueueConfig

MIN_RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 60.0
PLACE_S: Final = 1.0
"""How long a place is kept for a queued caller; then it goes to the next."""


class QueuedCaller:
    """A caller's place in the queue: it waits until ``is_given``, or until ``error`` is set: it never will be.

    ``wake`` returns False where the caller cannot be woken any more, since its loop is closed. It may be called twice.
    """

    __slots__ = ("caller", "error", "given_at", "is_given", "wake")

    def __init__(self, caller: Hashable, wake: Callable[[], bool]) -> None:
        self.caller = caller
        self.wake = wake
        self.is_given = False
        self.given_at = 0.0
        self.error: EngineError | None = None


class QueueLimits:
    """How much may wait, how much does, and the queue. Pure, and under the engine's lock.

    Requests that run do not wait: the limits on calls and tokens come on top of what can run at once.

    Attributes:
        num_logprob_bytes: reserved for unread logprobs. Running rows reserve their upper bound.
        refusal: raised by every new call, once the engine drains, is dead or closed.
    """

    def __init__(self, config: QueueConfig, *, max_running: int, max_total_tokens: int) -> None:
        self.num_calls = 0
        self.num_tokens = 0
        self.num_bytes = 0
        self.num_logprob_bytes = 0
        self.refusal: EngineError | None = None
        self._config = config
        self._max_running = max_running
        self._max_total_tokens = max_total_tokens
        self._queue: deque[QueuedCaller] = deque()
        self._given: dict[Hashable, QueuedCaller] = {}  # by caller, to those that have not called yet, the oldest first
        self._released_at = 0.0
        self._release_interval_s = MIN_RETRY_S

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def due_at(self) -> float | None:
        """When the oldest place that was not used yet goes to the next caller."""
        oldest = self._oldest
        return None if oldest is None else oldest.given_at + PLACE_S

    @property
    def _oldest(self) -> QueuedCaller | None:
        return next(iter(self._given.values()), None)

    def refuse(self, error: EngineError) -> None:
        """Refuse all new calls and all queued callers from now on."""
        self.refusal = error
        while self._queue:
            self._queue[0].error = error
            self._wake_first()

    def check_refusal(self) -> None:
        """Raise EngineError where new calls are refused, however little waits."""
        if self.refusal is not None:
            raise copy(self.refusal)

    # ------------------------------------------------------------ reservations

    def reserve(self, call: Call, caller: Hashable) -> None:
        """Reserve a place for a call; the one that was given to its caller, where there is one.

        Raises:
            EngineError: the engine takes no calls, or too much waits.
        """
        self.check_refusal()
        if self._given.pop(caller, None) is None and (excess := self._excess()) is not None:
            raise EngineOverloadedError(
                f"the engine is overloaded: {excess}; try again later", retry_after=self._retry_after()
            )
        # Nothing is called between these two: a signal handler that raises comes before both, or after.
        self.num_calls += 1
        call.is_reserved = True

    def add_bytes(self, call: Call, num_bytes: int) -> None:
        call.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def add_row(self, call: Call, prompt: int, num_tokens: int) -> None:
        """A row goes to the scheduler: its prompt counts until all rows of it have ended.

        Not where the call was released meanwhile: a signal handler raised on the thread that opened it.
        """
        if not call.is_reserved:
            return
        num_rows = call.num_rows_of.get(prompt, 0)
        if not num_rows:
            call.num_tokens += num_tokens
            self.num_tokens += num_tokens
        call.num_rows_of[prompt] = num_rows + 1

    @property
    def free_logprob_bytes(self) -> int:
        return self._config.max_logprob_bytes - self.num_logprob_bytes

    def reserve_logprobs(self, row: CallRow, num_bytes: int) -> None:
        """Reserve memory for the logprobs of a row, until ``CallRow.free_logprobs``.

        Raises:
            RequestTooLargeError: it does not fit beside the other rows of its call.
            EngineOverloadedError: it does not fit beside other calls.
        """
        call, most = row.call, self._config.max_logprob_bytes
        if call.num_logprob_bytes + num_bytes > most:
            others = f", beside {call.num_logprob_bytes} of other rows," if call.num_logprob_bytes else ""
            raise RequestTooLargeError(
                f"its logprobs may take {num_bytes} bytes{others} but max_logprob_bytes={most} are allowed; lower "
                "top_logprobs_num or max_new_tokens, use a stream or smaller batches, or raise max_logprob_bytes"
            )
        if num_bytes > self.free_logprob_bytes:
            raise EngineOverloadedError(
                f"the engine is overloaded: the logprobs of this request may take {num_bytes} bytes, beside "
                f"{self.num_logprob_bytes} of other requests (max_logprob_bytes={most}); try again later",
                retry_after=self._retry_after(),
            )
        call.counter = self
        row.num_logprob_bytes = num_bytes
        call.num_logprob_bytes += num_bytes
        self.num_logprob_bytes += num_bytes

    def end_row(self, call: Call, prompt: int, num_tokens: int, now: float) -> None:
        """A row has ended, and its call goes on."""
        num_rows = call.num_rows_of.pop(prompt, 0) - 1
        if num_rows > 0:
            call.num_rows_of[prompt] = num_rows
        elif num_rows == 0:
            call.num_tokens -= num_tokens
            self.num_tokens -= num_tokens
            self.serve(now)

    def release(self, call: Call, now: float) -> None:
        """The call is over, or was never opened. Harmless twice."""
        if not call.is_reserved:
            return
        call.is_reserved = False
        self.num_calls -= 1
        self.num_tokens -= call.num_tokens
        self.num_bytes -= call.num_bytes
        call.num_rows_of = {}  # none of them gives its tokens back again
        if self._released_at:
            self._release_interval_s += 0.1 * (now - self._released_at - self._release_interval_s)
        self._released_at = now
        self.serve(now)

    # ------------------------------------------------------------ the queue

    def enter(self, place: QueuedCaller, now: float) -> None:
        """Add a caller to the queue; its place may be given at once.

        Raises:
            EngineError: the engine takes no calls.
        """
        self.check_refusal()
        self._queue.append(place)
        self.serve(now)

    def remove(self, place: QueuedCaller, now: float) -> None:
        """The caller has gone, with or without its place."""
        self._forget(place)
        if place in self._queue:
            self._queue.remove(place)
        self.serve(now)

    def serve(self, now: float) -> None:
        """Take back the places that were not used, and give the free ones to the first callers of the queue."""
        while (oldest := self._oldest) is not None and oldest.given_at + PLACE_S <= now:
            self._forget(oldest)
        while self._queue and self._excess() is None:
            if (place := self._wake_first()) is not None:
                place.is_given, place.given_at = True, now
                self._given.pop(place.caller, None)  # it stands behind those that were given before
                self._given[place.caller] = place

    def _wake_first(self) -> QueuedCaller | None:
        """Wake the first caller of the queue, which then leaves it; None where it cannot be woken, or has left.

        It leaves afterwards: a signal handler may raise in here, and it would wait for ever. And garbage collection may
        run in here, which makes callers leave whose loops are gone.
        """
        place = self._queue[0]
        is_woken = place.wake()
        if not self._queue or self._queue[0] is not place:
            return None
        self._queue.popleft()
        return place if is_woken else None

    def _forget(self, place: QueuedCaller) -> None:
        if self._given.get(place.caller) is place:
            del self._given[place.caller]

    def _excess(self) -> str | None:
        """The limit that is reached, in words."""
        config = self._config
        num_waiting = self.num_calls + len(self._given) - self._max_running
        if num_waiting >= config.max_requests:
            return f"calls that wait: {num_waiting} (max_queued_requests={config.max_requests})"
        tokens_waiting = self.num_tokens - self._max_total_tokens
        if tokens_waiting >= config.max_tokens:
            return f"prompt tokens that wait: {tokens_waiting} (max_queued_tokens={config.max_tokens})"
        if self.num_bytes >= config.max_bytes:
            return f"the prompts of open calls have {self.num_bytes} bytes (max_queued_bytes={config.max_bytes})"
        return None

    def _retry_after(self) -> float:
        num_waiting = self.num_calls + len(self._queue) - self._max_running
        return min(MAX_RETRY_S, max(MIN_RETRY_S, self._release_interval_s * max(1, num_waiting) / 2))


class Overload:
    """The limits, and waiting until a call fits. From any thread and loop.

    A place that was given belongs to the caller (its task, or its thread) until its next call, for ``PLACE_S``.
    """

    def __init__(self, limits: QueueLimits, lock: threading.RLock, loop: asyncio.AbstractEventLoop) -> None:
        """``loop``: the engine's."""
        self.limits = limits
        self._lock = lock
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def reserve(self, call: Call) -> None:
        """Reserve a place for a call of this task or thread.

        Raises:
            EngineError: the engine takes no calls, or too much waits.
        """
        with self._lock:
            self.limits.reserve(call, this_caller())

    def release(self, call: Call) -> None:
        """The call was not opened. Harmless where nothing was reserved."""
        with self._lock:
            self.limits.release(call, time.monotonic())

    async def wait(self) -> None:
        """Queue until a call of this task fits. Cancelling it leaves the queue.

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
            self._remove(place)
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
            self._remove(place)
            raise
        _raise_refusal(place)

    def _enter(self, wake: Callable[[], bool]) -> QueuedCaller:
        def give() -> bool:
            post(self._loop, self._serve)  # which takes the place back where it is not used
            return wake()

        refuse_interrupting(self._lock)
        place = QueuedCaller(this_caller(), give)
        with self._lock:
            self.limits.enter(place, time.monotonic())
        return place

    def _remove(self, place: QueuedCaller) -> None:
        with self._lock:
            self.limits.remove(place, time.monotonic())

    def _serve(self) -> None:
        """Give places that were not used to the next callers; again when the oldest given one is due.

        Timers of a loop may be some milliseconds early.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            now = time.monotonic()
            self.limits.serve(now)
            due_at = self.limits.due_at
        if due_at is not None:
            self._timer = self._loop.call_later(due_at - now, self._serve)


def _raise_refusal(place: QueuedCaller) -> None:
    if place.error is not None:
        raise copy(place.error)


def _release(gate: threading.Lock) -> bool:
    if gate.locked():
        gate.release()
    return True
