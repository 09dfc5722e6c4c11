"""Uplink: sends progress, log records, readiness and failures to the frontend."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque

from aioengine.protocol.messages import LogRecord, Message
from aioengine.transport.base import BacklogFullError, Sender

_MAX_RECORDS_PER_S = 50.0
_MAX_BURST = 200.0


class Uplink:
    """Sends messages to the frontend. Messages of other threads wait for the main thread, which owns the socket."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._thread = threading.get_ident()
        self._pending: deque[Message] = deque(maxlen=1000)

    def send(self, messages: list[Message]) -> None:
        """Send pending messages, then these. Call it in the main thread."""
        if self._pending:
            messages = [*self._take_pending(), *messages]
        self._sender.send(messages)

    def post(self, message: Message) -> None:
        """Send ``message`` now in the main thread, or with the next flush in another thread."""
        self._pending.append(message)
        if threading.get_ident() == self._thread:
            self.flush()

    def flush(self) -> None:
        """Send pending messages of other threads. Call it in the main thread."""
        if self._pending:
            self._sender.send(self._take_pending())

    def _take_pending(self) -> list[Message]:
        return [self._pending.popleft() for _ in range(len(self._pending))]


class ForwardedLogs(logging.Handler):
    """Sends log records to the frontend's loggers of the same name. Above a maximum rate, records are only counted."""

    def __init__(self, uplink: Uplink) -> None:
        super().__init__()
        self._uplink = uplink
        self._allowance = _MAX_BURST
        self._refilled_at = time.monotonic()
        self._num_dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        self._allowance = min(_MAX_BURST, self._allowance + (now - self._refilled_at) * _MAX_RECORDS_PER_S)
        self._refilled_at = now
        if self._allowance < 1:
            self._num_dropped += 1
            return
        self._allowance -= 1
        text = self.format(record)
        if self._num_dropped:
            text += f" ({self._num_dropped} records before this one were too many at once and are left out)"
            self._num_dropped = 0
        with contextlib.suppress(BacklogFullError):  # the code that logs is not at fault; the next result raises it too
            self._uplink.post(LogRecord(record.name, record.levelno, encodable(text)))


def encodable(text: str) -> str:
    """Return ``text`` with escapes for characters that UTF-8 cannot encode. Paths may contain them."""
    return text.encode(errors="backslashreplace").decode()


def forward_logs(uplink: Uplink, level: str) -> ForwardedLogs:
    """Send records of the ``aioengine`` loggers of at least ``level`` to the frontend, and to no other handler."""
    handler = ForwardedLogs(uplink)
    logger = logging.getLogger("aioengine")
    logger.setLevel(level.upper())
    logger.propagate = False
    logger.addHandler(handler)
    return handler
