"""The order and the time limits of matching stop patterns, for all requests of the detokenizer process.

Matching may use a part of each step and a quarter of the time. Tokens of requests with slower patterns wait in the
queue, in order, so that they do not delay the texts of other requests. Each request also has a limit of its own; a
request that exceeds it fails.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from aioengine.protocol.messages import End

if TYPE_CHECKING:
    from aioengine.text.open_text import OpenText

STEP_BUDGET_S: Final = 0.01
"""CPU time of matching in one step, and in one turn of the queue; the search that exceeds it is the last."""

REST: Final = 3
"""After a turn the other requests have the process to themselves for this many times its length."""

OVERDUE_S: Final = 0.2
LONG_S: Final = 0.001


class Token(NamedTuple):
    """An id of a request, with the end of the request where it came in the same step.

    ``is_replayed``: its text has left already.
    """

    token_id: int
    end: End | None = None
    is_replayed: bool = False


class MatchingQueue:
    """The waiting tokens by request, and when their next turn is. It has no clock."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[OpenText, deque[Token | End]]] = {}
        self._next: int | None = None  # whose entry is taken next, while none of it took long
        self._rests_until = 0.0
        self._used_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, uid: int) -> bool:
        return uid in self._waiting

    def begin(self) -> None:
        """A step or a turn begins."""
        self._used_s = 0.0

    def spend(self, used_s: float) -> None:
        """Count CPU time of matching."""
        self._used_s += used_s
        if used_s > LONG_S:
            self._next = None

    @property
    def is_exhausted(self) -> bool:
        """Whether no more should be matched in this step or turn."""
        return self._used_s >= STEP_BUDGET_S

    def delays(self, request: OpenText) -> bool:
        """Whether a token of this request has to wait."""
        return request.uid in self._waiting or self.is_exhausted or request.is_slow

    def add(self, request: OpenText, token: Token) -> None:
        """Let a token wait, behind those of the same request."""
        if request.uid not in self._waiting:
            self._waiting[request.uid] = request, deque()
        self._waiting[request.uid][1].append(token)

    def add_end(self, end: End) -> None:
        """Let the end of a request wait, behind its tokens."""
        self._waiting[end.uid][1].append(end)

    def drop(self, uid: int) -> bool:
        """Forget what waits of a request; returns whether its end was among it."""
        if uid not in self._waiting:
            return False
        _, entries = self._waiting.pop(uid)
        return isinstance(entries[-1], End)

    def take(self) -> tuple[OpenText, Token | End]:
        """The next entry of the request whose patterns take the least time; there must be one."""
        uid = self._next
        if uid is None or uid not in self._waiting:
            uid = self._next = min(self._waiting, key=lambda uid: self._waiting[uid][0].expected_s)
        request, entries = self._waiting[uid]
        entry = entries.popleft()
        if not entries:
            del self._waiting[uid]
        return request, entry

    def is_due(self, now: float, *, has_news: bool) -> bool:
        """Whether a turn may begin. While there is news to send, it is put off for a moment."""
        return bool(self._waiting) and now >= self._rests_until + (OVERDUE_S if has_news else 0.0)

    def rest(self, now: float) -> None:
        """Matching that began at ``now`` has ended; other requests go first for a while."""
        self._rests_until = now + (1 + REST) * self._used_s

    def wait_s(self, now: float) -> float:
        """How long until the next turn, if something waits."""
        return max(0.0, self._rests_until - now)
