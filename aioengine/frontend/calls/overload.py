"""The limits on waiting calls, and the queue of callers that wait for capacity.

A call is counted before its arguments are checked, and until it is closed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from copy import copy
from typing import Final

from msgspec import Struct

from aioengine.errors import EngineError, EngineOverloadedError, RequestTooLargeError
from aioengine.frontend.callers import running_loop, this_caller
from aioengine.settings.config import QueueConfig
from aioengine.supervision.tasks import post, resolve

MIN_RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 60.0
RESERVED_S: Final = 1.0
"""Seconds for which capacity is reserved for a caller from the queue; then the next caller gets it."""


class QueuedCaller(Struct, eq=False):
    """A caller in the queue.

    Attributes:
        caller: its task or thread. wake: returns False if it cannot be woken because its loop is closed.
        reserved_at: when it got capacity. error: why it gets no capacity.
    """

    caller: Hashable
    wake: Callable[[], bool]
    reserved_at: float = 0.0
    error: EngineError | None = None


class Reservation(Struct, eq=False):
    """The part of one call in the counts of ``QueueLimits``. Under the engine's lock."""

    limits: QueueLimits

    is_held: bool = False
    """Whether the call is counted: from ``QueueLimits.reserve`` to ``QueueLimits.release``."""

    num_bytes: int = 0
    """Bytes of its prompts."""

    num_tokens: int = 0
    """Prompt tokens of its rows in the scheduler."""

    num_rows_of: dict[int, int] = {}
    """Index of a prompt -> number of its rows in the scheduler."""

    num_logprob_bytes: int = 0
    """Memory for the logprobs of its rows. Unread logprobs keep it after ``QueueLimits.release``."""

    def free_logprobs(self, num_bytes: int | None = None) -> None:
        """Free ``num_bytes`` of the memory for logprobs; None: all of it."""
        freed = self.num_logprob_bytes if num_bytes is None else min(num_bytes, self.num_logprob_bytes)
        self.num_logprob_bytes -= freed
        self.limits.num_logprob_bytes -= freed


class QueueLimits:
    """The limits, the counts of open calls, and the queue of callers. No clock, no loop; under the engine's lock.

    The limits on calls and tokens apply to waiting requests: the capacity for running requests is added to them.

    Attributes:
        num_logprob_bytes: reserved for unread logprobs. Running rows reserve their upper bound.
        refusal: every new call raises it when the engine drains, is dead or closed.
        _reserved: callers from the queue that have not called yet, the oldest first.
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
        self._reserved: dict[Hashable, QueuedCaller] = {}
        self._released_at = 0.0
        self._release_interval_s = MIN_RETRY_S

    @property
    def due_at(self) -> float | None:
        """When the oldest unused reservation goes to the next caller."""
        oldest = next(iter(self._reserved.values()), None)
        return None if oldest is None else oldest.reserved_at + RESERVED_S

    def refuse(self, error: EngineError) -> None:
        """Refuse all new calls and all queued callers from now on."""
        self.refusal = error
        while self._queue:
            queued = self._queue.popleft()
            queued.error = error
            queued.wake()

    def check_refusal(self) -> None:
        """Raise EngineError if all new calls are refused."""
        if self.refusal is not None:
            raise copy(self.refusal)

    # ------------------------------------------------------------ reservations

    def reserve(self, reservation: Reservation) -> None:
        """Count a new call. A caller from the queue uses its reservation.

        Raises:
            EngineError: the engine accepts no calls, or too much waits.
        """
        self.check_refusal()
        is_queued = self._reserved and self._reserved.pop(this_caller(), None) is not None
        if not is_queued and (excess := self._excess()) is not None:
            message = f"the engine is overloaded: {excess}; try again later"
            raise EngineOverloadedError(message, retry_after=self._retry_after())
        self.num_calls += 1
        reservation.is_held = True

    def add_bytes(self, reservation: Reservation, num_bytes: int) -> None:
        """Count the bytes of a prompt. Raises EngineError if calls are refused meanwhile."""
        self.check_refusal()
        reservation.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def add_row(self, reservation: Reservation, prompt_index: int, num_tokens: int) -> None:
        """Count the prompt of a submitted row, until all rows of the prompt have ended.

        Does nothing if the call was released because a signal handler raised on the thread that opened it.
        """
        if not reservation.is_held:
            return
        num_rows = reservation.num_rows_of.get(prompt_index, 0)
        if not num_rows:
            reservation.num_tokens += num_tokens
            self.num_tokens += num_tokens
        reservation.num_rows_of[prompt_index] = num_rows + 1

    @property
    def num_free_logprob_bytes(self) -> int:
        return self._config.max_logprob_bytes - self.num_logprob_bytes

    def reserve_logprobs(self, reservation: Reservation, num_bytes: int) -> None:
        """Reserve memory for the logprobs of a row, until ``Reservation.free_logprobs``.

        Raises:
            RequestTooLargeError: it does not fit with the other rows of its call.
            EngineOverloadedError: it does not fit with other calls.
        """
        num_others, limit = reservation.num_logprob_bytes, self._config.max_logprob_bytes
        if num_others + num_bytes > limit:
            others = f", besides {num_others} of other rows," if num_others else ""
            raise RequestTooLargeError(
                f"its logprobs may take {num_bytes} bytes{others} but max_logprob_bytes={limit} are allowed; lower "
                "top_logprobs_num or max_new_tokens, use a stream or smaller batches, or raise max_logprob_bytes"
            )
        if num_bytes > self.num_free_logprob_bytes:
            message = f"the engine is overloaded: open requests use max_logprob_bytes={limit}; try again later"
            raise EngineOverloadedError(message, retry_after=self._retry_after())
        reservation.num_logprob_bytes += num_bytes
        self.num_logprob_bytes += num_bytes

    def end_row(self, reservation: Reservation, prompt_index: int, num_tokens: int, now: float) -> None:
        """Free the part of a row that has ended, while its call continues."""
        num_rows = reservation.num_rows_of.pop(prompt_index, 0) - 1
        if num_rows > 0:
            reservation.num_rows_of[prompt_index] = num_rows
        elif num_rows == 0:
            reservation.num_tokens -= num_tokens
            self.num_tokens -= num_tokens
            self.serve(now)

    def release(self, reservation: Reservation, now: float) -> None:
        """Free the part of a call that is over or was never opened. May be called twice."""
        if not reservation.is_held:
            return
        reservation.is_held = False
        self.num_calls -= 1
        self.num_tokens -= reservation.num_tokens
        self.num_bytes -= reservation.num_bytes
        reservation.num_rows_of = {}  # so that no row frees its tokens again
        if self._released_at:
            self._release_interval_s += 0.1 * (now - self._released_at - self._release_interval_s)
        self._released_at = now
        self.serve(now)

    # ------------------------------------------------------------ the queue

    def enter(self, queued: QueuedCaller, now: float) -> None:
        """Add a caller to the queue. If there is capacity, it is woken at once.

        Raises:
            EngineError: the engine accepts no calls.
        """
        self.check_refusal()
        self._queue.append(queued)
        self.serve(now)

    def remove(self, queued: QueuedCaller, now: float) -> None:
        """Remove a caller that stopped waiting, and its reservation."""
        self._forget(queued)
        if queued in self._queue:
            self._queue.remove(queued)
        self.serve(now)

    def serve(self, now: float) -> None:
        """Drop reservations that were not used, and reserve free capacity for the first callers of the queue."""
        while self._reserved and (due_at := self.due_at) is not None and due_at <= now:
            self._forget(next(iter(self._reserved.values())))
        while self._queue and self._excess() is None:
            queued = self._queue.popleft()
            queued.reserved_at = now
            self._reserved.pop(queued.caller, None)  # the newest reservation is the last one
            self._reserved[queued.caller] = queued
            if not queued.wake():
                self._forget(queued)

    def _forget(self, queued: QueuedCaller) -> None:
        if self._reserved.get(queued.caller) is queued:
            del self._reserved[queued.caller]

    def _excess(self) -> str | None:
        """Return the limit that is reached, in words; None: there is capacity."""
        config = self._config
        num_waiting = self.num_calls + len(self._reserved) - self._max_running
        if num_waiting >= config.max_requests:
            return f"{num_waiting} calls are waiting (max_queued_requests={config.max_requests})"
        tokens_waiting = self.num_tokens - self._max_total_tokens
        if tokens_waiting >= config.max_tokens:
            return f"{tokens_waiting} prompt tokens are waiting (max_queued_tokens={config.max_tokens})"
        if self.num_bytes >= config.max_bytes:
            return f"the prompts of open calls have {self.num_bytes} bytes (max_queued_bytes={config.max_bytes})"
        return None

    def _retry_after(self) -> float:
        num_waiting = self.num_calls + len(self._queue) - self._max_running
        return min(MAX_RETRY_S, max(MIN_RETRY_S, self._release_interval_s * max(1, num_waiting) / 2))


class CallerQueue:
    """Lets callers wait in the queue of ``QueueLimits``, from any thread and loop.

    Capacity is then reserved for the next call of the caller (its task, or its thread), for ``RESERVED_S``.
    """

    def __init__(self, limits: QueueLimits, lock: threading.RLock, loop: asyncio.AbstractEventLoop) -> None:
        """``loop``: the engine's."""
        self.limits = limits
        self._lock = lock
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, caller: Hashable | None = None) -> None:
        """Wait in the queue until a call of ``caller`` (None: this task) fits. Cancelling the wait leaves the queue.

        Raises:
            EngineError: the engine died, was shut down or is drained.
            WrongLoopError: no asyncio loop is running here.
        """
        loop = running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> bool:
            post(self._loop, self._serve)  # drops the reservation later if it is not used
            return post(loop, resolve, future)

        queued = QueuedCaller(this_caller() if caller is None else caller, wake)
        with self._lock:
            self.limits.enter(queued, time.monotonic())
        try:
            await future
        except BaseException:
            with self._lock:
                self.limits.remove(queued, time.monotonic())
            raise
        if queued.error is not None:
            raise copy(queued.error)

    def _serve(self) -> None:
        """Give unused reservations to the next callers, now and when the oldest reservation expires.

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
