"""Requests that outlive their readers: leaving such a stream detaches it, and somebody may attach to it for a while.

A request with ``resume_ttl`` goes on when its reader leaves, and what it gives is kept. It is forgotten when nobody
has been reading for so long, counted from the leaving or from its end, whichever came later.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, cast

from aioengine import checks
from aioengine.frontend.interrupts import refuse_interrupting
from aioengine.frontend.outputs import Reader
from aioengine.frontend.replay import AttachableOutput

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from aioengine.frontend.calls import Call, Calls
    from aioengine.frontend.outputs import Calls as ReaderCalls
    from aioengine.frontend.router import Router

MAX_KEPT_TOKENS: Final = 1 << 20
"""Output tokens of ended requests that are kept, in all; beyond it those that ended first are forgotten."""


class Attachment:
    """One attachable request. ``until``: when it is forgotten, None while it runs and is read.

    num_kept: tokens that are kept of it after its end.
    """

    __slots__ = ("call", "is_ended", "num_kept", "output", "timer", "until")

    def __init__(self, call: Call, output: AttachableOutput) -> None:
        self.call = call
        self.output = output
        self.is_ended = False
        self.num_kept = 0
        self.until: float | None = None
        self.timer: asyncio.TimerHandle | None = None


class Attachments:
    """Those that can be attached to, by id. On the engine's loop, except ``attach``."""

    def __init__(self, calls: Calls, router: Router, *, lock: threading.RLock, settle: Callable[[Call], None]) -> None:
        """``settle`` ends a call that nobody will read any more."""
        self._calls = calls
        self._router = router
        self._lock = lock
        self._settle = settle
        self._by_rid: dict[str, Attachment] = {}
        self._num_kept_tokens = 0

    def add(self, call: Call) -> None:
        """A call was opened."""
        if isinstance(call.output, AttachableOutput):
            self._by_rid[call.rid] = Attachment(call, call.output)

    def attach(self, rid: str, from_offset: object, readers: ReaderCalls) -> Reader:
        """A reader of what the request gives from the ``from_offset``-th character on; the one before is at its end.

        Raises:
            ValueError: there is no such request, or it has not given so much text.
        """
        offset = checks.whole("from_offset", from_offset, 0)
        refuse_interrupting(self._lock)
        with self._lock:
            attachment = self._by_rid.get(checks.text("rid", rid))
            if attachment is None:
                raise ValueError(
                    f"no request {checks.shown(rid)} can be attached to: it had no resume_ttl, or its time is over"
                )
            output = self._hand_over(attachment, offset)
            if not attachment.is_ended:
                attachment.until = None
        readers.feed(output)  # on the loop: it goes on where it was suspended, and is closed where it just ended
        return Reader(output, lock=self._lock, calls=readers)

    def detach(self, call: Call) -> bool:
        """The reader has left; whether the call goes on without one."""
        with self._lock:
            attachment = self._by_rid.get(call.rid)
            if attachment is None or attachment.call is not call or attachment.is_ended:
                return False
            self._hand_over(attachment, None)
        self._forget_later(attachment)
        return True

    def ended(self, call: Call) -> None:
        """The call is over: it has all it will ever have."""
        attachment = self._by_rid.get(call.rid)
        if attachment is None or attachment.call is not call or attachment.is_ended:
            return
        attachment.is_ended = True
        if attachment.output.is_left:  # for good
            self._forget(attachment)
            return
        with self._lock:
            self._by_rid[call.rid] = self._by_rid.pop(call.rid)  # behind those that ended before
            attachment.num_kept = attachment.output.replay.num_tokens
            self._num_kept_tokens += attachment.num_kept
        self._forget_later(attachment)
        while self._num_kept_tokens > MAX_KEPT_TOKENS:
            with self._lock:
                first = next(one for one in self._by_rid.values() if one.is_ended)
            self._forget(first)

    def discard(self, call: Call) -> None:
        """Nobody can attach to this call, nor is its id in use, any more."""
        attachment = self._by_rid.get(call.rid)
        if attachment is not None and attachment.call is call:
            self._forget(attachment)
        with self._lock:
            self._calls.free_names(call)

    def clear(self) -> None:
        """Nobody can attach any more."""
        for attachment in list(self._by_rid.values()):
            self._forget(attachment)

    def _hand_over(self, attachment: Attachment, offset: int | None) -> AttachableOutput:
        """The output goes on in a new one; under the lock."""
        before, call = attachment.output, attachment.call
        heir = attachment.output = before.successor(offset)
        call.output = heir
        if self._calls.by_output.pop(before, None) is not None:
            self._calls.by_output[heir] = call
        for row in heir.live.values():
            if row.uid in self._router.rows:
                self._router.rows[row.uid] = row
        before.live.clear()
        before.is_left = True
        before.ready.clear()
        before.wake()
        return heir

    def _forget_later(self, attachment: Attachment) -> None:
        attachment.until = time.monotonic() + cast("float", attachment.call.ask.resume_ttl_s)
        self._set_timer(attachment, attachment.until)

    def _set_timer(self, attachment: Attachment, until: float) -> None:
        if attachment.timer is not None:
            attachment.timer.cancel()
        delay_s = until - time.monotonic()
        attachment.timer = asyncio.get_running_loop().call_later(delay_s, self._expire, attachment)

    def _expire(self, attachment: Attachment) -> None:
        with self._lock:
            until = attachment.until
            if until is None:  # somebody reads it again
                return
            is_due = until <= time.monotonic()
            if is_due and not attachment.is_ended:
                attachment.output.is_left = True
        if not is_due:
            self._set_timer(attachment, until)
        elif attachment.is_ended:
            self._forget(attachment)
        else:
            self._settle(attachment.call)

    def _forget(self, attachment: Attachment) -> None:
        if attachment.timer is not None:
            attachment.timer.cancel()
        with self._lock:
            del self._by_rid[attachment.call.rid]
            self._num_kept_tokens -= attachment.num_kept
            self._calls.free_names(attachment.call)
