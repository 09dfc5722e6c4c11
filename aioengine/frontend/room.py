"""Room: how much may wait, and the line of those who wait until there is room.

Everything here stands under the engine's lock and never waits: who waits is woken by a callback.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Final

from aioengine.errors import EngineOverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from aioengine.config import QueueConfig
    from aioengine.errors import EngineError

MIN_RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 60.0
PLACE_S: Final = 1.0
"""A place that was given to somebody in the line and is not used for so long goes to the next."""


class Place:
    """Somebody's place in the line: in it until ``is_given``, or until ``error`` says that it will never be.

    ``wake`` returns False where nobody can be woken any more, since the loop of the one who waited is closed.
    """

    __slots__ = ("caller", "error", "given_at", "is_given", "wake")

    def __init__(self, caller: Hashable, wake: Callable[[], bool]) -> None:
        self.caller = caller
        self.wake = wake
        self.is_given = False
        self.given_at = 0.0
        self.error: EngineError | None = None


class Room:
    """The bounds on what waits, what there is, and the line.

    What runs does not wait: the bounds on calls and tokens are on top of what can run at once.
    """

    def __init__(self, bounds: QueueConfig, *, max_running: int, max_total_tokens: int) -> None:
        self.num_calls = 0
        self.num_tokens = 0
        self.num_bytes = 0
        self._bounds = bounds
        self._max_running = max_running
        self._max_total_tokens = max_total_tokens
        self._line: deque[Place] = deque()
        self._given: deque[Place] = deque()  # to somebody who has not called yet, the oldest first
        self._num_given: Counter[Hashable] = Counter()
        self._closed_at = 0.0
        self._close_interval_s = MIN_RETRY_S

    @property
    def num_in_line(self) -> int:
        return len(self._line)

    @property
    def due_at(self) -> float | None:
        """When the oldest place that was not used yet goes to the next."""
        return self._given[0].given_at + PLACE_S if self._given else None

    def check(self, caller: Hashable) -> None:
        """Raise EngineOverloadedError where there is no room for a call of ``caller``, whose places are kept for it."""
        full = None if self._num_given.get(caller) else self._full()
        if full is not None:
            raise EngineOverloadedError(
                f"the engine is overloaded: {full}; try again later", retry_after=self._retry_after()
            )

    def use_place(self, caller: Hashable) -> None:
        """A call is opened, on the place of its caller where it has one."""
        if self._num_given.get(caller):
            self._forget(next(place for place in self._given if place.caller == caller))

    def give_back(self, num_tokens: int, num_bytes: int, now: float) -> None:
        """A call is over."""
        self.num_calls -= 1
        self.num_tokens -= num_tokens
        self.num_bytes -= num_bytes
        if self._closed_at:
            self._close_interval_s += 0.1 * (now - self._closed_at - self._close_interval_s)
        self._closed_at = now
        self.serve(now)

    def give_back_tokens(self, num_tokens: int, now: float) -> None:
        """A prompt of a call that goes on waits no longer."""
        self.num_tokens -= num_tokens
        self.serve(now)

    # ------------------------------------------------------------ the line

    def enter_line(self, place: Place, now: float) -> None:
        """Stand in line; the place may be given at once."""
        self._line.append(place)
        self.serve(now)

    def leave_line(self, place: Place, now: float) -> None:
        """Whoever stood there has gone, with or without the place."""
        if place.is_given:
            self._forget(place)
        elif place in self._line:
            self._line.remove(place)
        self.serve(now)

    def serve(self, now: float) -> None:
        """Take back the places that were not used, and give what room there is to the first in line."""
        while (due_at := self.due_at) is not None and due_at <= now:
            self._forget(self._given[0])
        while self._line and self._full() is None:
            place = self._line.popleft()
            if place.wake():
                place.is_given, place.given_at = True, now
                self._given.append(place)
                self._num_given[place.caller] += 1

    def fail(self, error: EngineError) -> None:
        """Nobody will be let in any more."""
        while self._line:
            place = self._line.popleft()
            place.error = error
            place.wake()

    def _forget(self, place: Place) -> None:
        if place in self._given:
            self._given.remove(place)
            self._num_given[place.caller] -= 1
            if not self._num_given[place.caller]:
                del self._num_given[place.caller]

    # ------------------------------------------------------------ bounds

    def _full(self) -> str | None:
        """What there is too much of."""
        bounds = self._bounds
        num_waiting = self.num_calls + len(self._given) - self._max_running
        if num_waiting >= bounds.max_requests:
            return f"{num_waiting} calls wait (max_queued_requests={bounds.max_requests})"
        tokens_waiting = self.num_tokens - self._max_total_tokens
        if tokens_waiting >= bounds.max_tokens:
            return f"{tokens_waiting} prompt tokens wait (max_queued_tokens={bounds.max_tokens})"
        if self.num_bytes >= bounds.max_bytes:
            return f"the prompts of open calls have {self.num_bytes} bytes (max_queued_bytes={bounds.max_bytes})"
        return None

    def _retry_after(self) -> float:
        num_waiting = self.num_calls + len(self._line) - self._max_running
        return min(MAX_RETRY_S, max(MIN_RETRY_S, self._close_interval_s * max(1, num_waiting) / 2))
