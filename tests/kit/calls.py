"""Calls without an engine: a call, its rows, and a reader whose requests to the engine are recorded."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from aioengine.frontend.calls.call import Call, CallRow
from aioengine.frontend.calls.overload import QueueLimits, Reservation
from aioengine.frontend.calls.reader import Reader
from aioengine.frontend.calls.row_types import row_type
from aioengine.frontend.intake.prompts import text_prompt
from aioengine.frontend.intake.requests import CallRequest
from aioengine.settings.config import QueueConfig

if TYPE_CHECKING:
    from collections import deque

LIMITS = QueueLimits(QueueConfig(), max_running=1, max_total_tokens=100)


class ReaderRequests:
    """Records the requests of a reader to the engine."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def leave(self, call: Call, ready: deque[CallRow], *, later: bool = False) -> None:
        self.names.append("leave")

    def check_can_wait(self, *, blocks: bool) -> None:
        """This thread can be woken."""

    def abort(self, call: Call) -> None:
        self.names.append("abort")

    def on_read(self, call: Call) -> None:
        self.names.append("on_read")


def make_call(num_rows: int = 1, called_at: float = 0.0, *, is_batch: bool | None = None, **fields: Any) -> Call:
    """Return a call with these fields of its request."""
    is_batch = num_rows > 1 if is_batch is None else is_batch
    request = CallRequest("prompt", ["a"] * num_rows, text_prompt, is_batch=is_batch, **fields)
    request.num_prompts = request.num_rows = num_rows
    request.gives_batch = is_batch
    request.rid = "x"
    return call_of(request, called_at)


def call_of(request: CallRequest, called_at: float = 0.0) -> Call:
    return Call(request, Reservation(LIMITS), called_at, "default")


def add_row(call: Call, index: int = 0, **fields: Any) -> CallRow:
    """Start a row of a call."""
    row = row_type(call.request)(call, index, **fields)
    call.add_row(row)
    return row


def make_reader(call: Call, requests: ReaderRequests | None = None, lock: threading.RLock | None = None) -> Reader:
    return Reader(call, call.ready, lock=lock or threading.RLock(), actions=requests or ReaderRequests())
