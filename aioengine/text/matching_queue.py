"""MatchingQueue limits the time that the detokenizer process spends on stop patterns.

In each step, matching may use ``STEP_BUDGET_S`` of CPU time. The remaining tokens, and all tokens of requests with slow
patterns, wait in the queue, so they do not delay the texts of other requests. They are matched in *turns* between the
steps. A turn has the same budget. A pause without turns follows a step that used up its budget. It also follows a turn
if some open requests have no tokens in the queue. Each request also has its own limit (``RegexSearch``): a request that
exceeds it fails.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from aioengine.protocol.messages import End

if TYPE_CHECKING:
    from aioengine.text.open_text import OpenText

STEP_BUDGET_S: Final = 0.01
"""CPU time of matching in one step, and in one turn of the queue. After it is used up, no other search starts."""

PAUSE_FACTOR: Final = 3
"""A pause is this many times as long as the CPU time of the turn or step before it."""

OVERDUE_S: Final = 0.2
"""While there are chunks to send, no turn begins until this long after the pause."""

LONG_S: Final = 0.001
"""After a longer match, ``take`` chooses the request again."""


class QueuedToken(NamedTuple):
    """An id of a request.

    Attributes:
        end: the end of the request, if it came in the same step.
        is_replayed: its text was sent before a process was replaced. Matching it only restores the state of the search.
    """

    token_id: int
    end: End | None = None
    is_replayed: bool = False


class MatchingQueue:
    """The waiting tokens of each request, and the time of the next turn. It has no clock.

    Attributes:
        waiting: uid -> its request, with its queued tokens and its end.
        used_s: CPU time of matching in this step or turn.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[OpenText, deque[QueuedToken | End]]] = {}
        self.used_s = 0.0
        self._next_uid: int | None = None  # the request of the next entry, until one of its entries takes long
        self._paused_until = 0.0

    def spend(self, used_s: float) -> None:
        """Count CPU time of matching."""
        self.used_s += used_s
        if used_s > LONG_S:
            self._next_uid = None

    @property
    def is_exhausted(self) -> bool:
        """Whether the time of this step or turn is used up."""
        return self.used_s >= STEP_BUDGET_S

    def delays(self, request: OpenText) -> bool:
        """Whether a token of this request has to wait."""
        return request.uid in self.waiting or self.is_exhausted or request.is_slow

    def add(self, request: OpenText, entry: QueuedToken | End) -> None:
        """Queue a token or the end of a request after its other tokens."""
        _, entries = self.waiting.setdefault(request.uid, (request, deque()))
        entries.append(entry)

    def drop(self, uid: int) -> bool:
        """Remove the entries of a request. Return whether its end was one of them."""
        if uid not in self.waiting:
            return False
        _, entries = self.waiting.pop(uid)
        return isinstance(entries[-1], End)

    def take(self) -> tuple[OpenText, QueuedToken | End]:
        """Remove and return the next entry of the request whose patterns take the least time.

        The same request is used again, until it has no entry or a match takes longer than ``LONG_S``.
        """
        uid = self._next_uid
        if uid is None or uid not in self.waiting:
            uid = self._next_uid = min(self.waiting, key=lambda uid: self.waiting[uid][0].expected_s)
        request, entries = self.waiting[uid]
        entry = entries.popleft()
        if not entries:
            del self.waiting[uid]
        return request, entry

    def is_due(self, now: float, *, has_news: bool) -> bool:
        """Whether a turn may begin. has_news: there are chunks to send, see ``OVERDUE_S``."""
        return now >= self._paused_until + (OVERDUE_S if has_news else 0.0)

    def end(self, now: float, *, pauses: bool) -> None:
        """End a step or turn that began at ``now``. pauses: a pause follows."""
        if pauses:
            self._paused_until = now + (1 + PAUSE_FACTOR) * self.used_s
        self.used_s = 0.0

    def wait_s(self, now: float) -> float:
        """Return the seconds until the pause ends."""
        return max(0.0, self._paused_until - now)
