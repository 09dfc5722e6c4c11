"""Attachments: calls with ``resume_ttl``, which continue when their reader leaves, and to which others may attach.

The output of such a call is kept. It is forgotten ``resume_ttl`` seconds after its reader left or read its end.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from copy import copy
from typing import Final, cast

from msgspec import Struct

from aioengine.api import checks
from aioengine.errors import EngineClosedError
from aioengine.frontend.calls.call import Call, CallRow, NotifyOn
from aioengine.frontend.calls.call_ids import CallIds
from aioengine.frontend.calls.reader import Reader, ReaderActions
from aioengine.frontend.calls.row_types import Log, LoggedRow

MAX_KEPT_TOKENS: Final = 1 << 20
"""Tokens of ended requests that are kept. If there are more, the requests that ended first are forgotten."""

TOKENS_PER_REQUEST: Final = 32
"""Tokens that every ended request counts in addition to its own: about the memory of its objects (5 kB)."""


class Attachment(Struct, eq=False):
    """One attachable call.

    Attributes:
        until: when it is forgotten; None: it runs or is read.
        num_kept: tokens that it counts after its end.
    """

    call: Call
    is_ended: bool = False
    num_kept: int = 0
    until: float | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def row(self) -> LoggedRow | None:
        """Its row; None: not started."""
        return cast("LoggedRow | None", self.call.kept_row)

    @property
    def is_read_to_end(self) -> bool:
        """Whether the call has ended, and its present reader (if any) has read the end."""
        call, row = self.call, self.row
        is_unread = row is not None and row.has_unread and call.has_reader and call.error is None and not call.num_open
        return self.is_ended and not is_unread

    def next_until(self) -> float:
        """Return when it is forgotten, unless it is read from now on."""
        return time.monotonic() + cast("float", self.call.request.resume_ttl_s)

    def end(self) -> None:
        """The call is over: keep only what readers can still get."""
        self.is_ended = True
        self.call.notify_on = NotifyOn.END_READ  # the time to attach starts when a reader has read the end
        self.num_kept = TOKENS_PER_REQUEST
        if (row := self.row) is not None:
            if not self.call.request.shows_prompt:
                row.prompt_token_ids = []
            self.num_kept += row.num_kept_tokens


class Attachments:
    """The attachable calls. On the engine's loop; ``attach`` from any thread.

    Each decision (which reader reads, whether the time is over) is made and carried out in one step under the lock.
    """

    def __init__(self, ids: CallIds, *, lock: threading.RLock, close_if_over: Callable[[Call], None]) -> None:
        """``close_if_over`` closes a call that is over."""
        self._ids = ids
        self._lock = lock
        self._close_if_over = close_if_over
        self._by_call: dict[Call, Attachment] = {}
        self._num_kept_tokens = 0
        self._closed: EngineClosedError | None = None

    def add(self, call: Call) -> None:
        """Add an opened call. Under the lock."""
        self._by_call[call] = Attachment(call)

    def attach(self, rid: str, from_offset: object, actions: ReaderActions) -> Reader:
        """Return a reader of the text from character ``from_offset`` on. The previous reader is closed.

        Raises:
            ValueError: there is no such call, or its text is shorter.
            EngineClosedError: the engine was shut down.
        """
        offset = checks.whole("from_offset", from_offset, 0)
        rid = checks.text("rid", rid)
        with self._lock:
            named = self._ids.find(rid)
            attachment = None if named is None else self._by_call.get(named[0])
            if attachment is None:
                if self._closed is not None:
                    raise copy(self._closed)
                raise ValueError(f"no request {checks.shown(rid)} can be attached to, or its time is over")
            call, row, ready = attachment.call, attachment.row, deque[CallRow]()
            (Log() if row is None else row.log).token_index(offset)  # raises ValueError
            reader = Reader(call, ready, lock=self._lock, actions=actions)  # if interrupted from here on, it is left
            call.wake()  # the old reader looks again once the lock is free
            call.ready, call.has_reader = ready, True
            if row is not None:
                row.rewind(offset)
            attachment.until = attachment.next_until() if attachment.is_read_to_end else None
        actions.on_read(call)  # on the loop: continues a suspended call
        return reader

    def on_read(self, call: Call) -> None:
        """A reader has read or left. Forget the call some time after its end was read or its last reader left."""
        with self._lock:
            attachment = self._by_call.get(call)
            if attachment is not None and (attachment.is_read_to_end or not call.has_reader):
                self._forget_later(attachment)

    def ended(self, call: Call) -> None:
        """A call is over: keep its output for later readers."""
        with self._lock:
            attachment = self._by_call.get(call)
            if attachment is None or attachment.is_ended:
                return
            attachment.end()
            self._by_call[call] = self._by_call.pop(call)  # in the order of their ends
            self._num_kept_tokens += attachment.num_kept
            if attachment.is_read_to_end:
                self._forget_later(attachment)
            while self._num_kept_tokens > MAX_KEPT_TOKENS:
                self._forget(next(one for one in self._by_call.values() if one.is_ended))

    def discard(self, call: Call) -> None:
        """Forget this call, and free its id."""
        with self._lock:
            if (attachment := self._by_call.get(call)) is not None:
                self._forget(attachment)
            self._ids.free(call)

    def clear(self, error: EngineClosedError) -> None:
        """Forget all requests; ``attach`` raises ``error`` from now on."""
        with self._lock:
            self._closed = error
            for attachment in list(self._by_call.values()):
                self._forget(attachment)

    def _forget_later(self, attachment: Attachment) -> None:
        attachment.until = attachment.next_until()
        self._set_timer(attachment, attachment.until)

    def _set_timer(self, attachment: Attachment, until: float) -> None:
        if attachment.timer is not None:
            attachment.timer.cancel()
        delay_s = until - time.monotonic()
        attachment.timer = asyncio.get_running_loop().call_later(delay_s, self._expire, attachment)

    def _expire(self, attachment: Attachment) -> None:
        with self._lock:
            until = attachment.until
            if until is None:  # it is read again
                return
            if until > time.monotonic():
                self._set_timer(attachment, until)
                return
            self._forget(attachment)
            attachment.call.leave()
        self._close_if_over(attachment.call)

    def _forget(self, attachment: Attachment) -> None:
        """Forget a request, and free its id. Under the lock."""
        if attachment.timer is not None:
            attachment.timer.cancel()
        del self._by_call[attachment.call]
        self._num_kept_tokens -= attachment.num_kept
        attachment.call.kept_row = None  # a reference cycle
        self._ids.free(attachment.call)
