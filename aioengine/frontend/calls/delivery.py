"""Delivery: puts the output of the processes into rows, and wakes their readers."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from aioengine.frontend.calls.call import Call, CallRow
from aioengine.protocol.messages import End, TextChunks

MAX_WOKEN = 128
"""Maximum readers that are woken in one iteration of the loop, not counting readers of ended rows. They read in the
next iteration, and free their chunks before other readers are woken. Otherwise, a thousand streams would trigger
garbage collection at every step."""

MAX_ENDED = 64
"""Rows that are ended in one iteration of the loop: each takes about 15 microseconds. If hundreds of rows end in one
step, the readers of other rows do not wait for all of them."""

MAX_EXTRA_BYTES: Final = 256 * 1024
"""Size of the extras that are read in one iteration of the loop: 33,000 to 65,000 logprobs, some milliseconds."""

EXTRA_BYTES: Final = 128
"""Added to the size of each extra, because reading a tiny extra takes as long as reading this many bytes."""


class Delivery:
    """Puts chunks into their rows, and wakes their readers. On the engine's loop.

    Reading many extras takes long. If the extras of a message exceed the limit of this iteration of the loop, the
    message waits for a later iteration. All later messages wait behind it.

    Attributes:
        rows: ``Calls.rows``. num_detokenizing: open requests in the detokenizer.
    """

    def __init__(self, rows: dict[int, CallRow], lock: threading.RLock, on_ended: Callable[[CallRow], None]) -> None:
        """``on_ended`` is called with each ended row, without the lock."""
        self.rows = rows
        self.num_detokenizing = 0
        self._lock = lock
        self._on_ended = on_ended
        self._calls_to_wake: list[Call] = []
        self._ends: list[End] = []
        self._waiting: deque[TextChunks] = deque()
        self._bytes_left = MAX_EXTRA_BYTES  # of extras, in this iteration of the loop

    def deliver(self, chunks: TextChunks) -> None:
        """Put the chunks of one message into their rows, now or later. Call ``wake`` afterwards."""
        if chunks.tokens.extras or self._waiting:
            num_bytes = sum(len(extra.data) + EXTRA_BYTES for extra in chunks.tokens.extras)
            # a message that is too large for any iteration is read alone, at the start of one
            is_large = num_bytes > self._bytes_left and self._bytes_left < MAX_EXTRA_BYTES
            if self._waiting or is_large:
                self._waiting.append(chunks)
                if len(self._waiting) == 1:
                    asyncio.get_running_loop().call_soon(self._deliver_waiting)
                return
            self._bytes_left -= num_bytes
        self._put(chunks)

    def _deliver_waiting(self) -> None:
        """Put one waiting message into its rows, and the next one in the next iteration of the loop."""
        chunks = self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._deliver_waiting)
        self._put(chunks)
        self.wake()

    def _put(self, chunks: TextChunks) -> None:
        with self._lock:
            rows = self.rows
            for first_token in chunks.first_tokens:
                if (row := rows.get(first_token.uid)) is not None:
                    row.note_first_token(first_token)
            for uid in chunks.preempted:
                if (row := rows.get(uid)) is not None:
                    row.count_preemption()
            for uid in chunks.compiled:
                if (row := rows.get(uid)) is not None:
                    row.call.note_compiled(row)
            for extra in chunks.tokens.extras:
                if (row := rows.get(extra.uid)) is not None:
                    row.put_extra(extra)
            tokens, ending = chunks.tokens, {end.uid for end in chunks.ended}
            calls: list[Call] = []
            for uid, text, new in zip(tokens.uids, chunks.texts, tokens.rows(), strict=True):
                row = rows.get(uid)
                if row is not None and row.put(text, new) and uid not in ending:
                    calls.append(row.call)
        # The last rows of a step have first tokens. Their readers have waited longest, so they are woken first.
        num_others = len(calls) - len(chunks.first_tokens)
        self._calls_to_wake = calls[num_others:] + self._calls_to_wake + calls[:num_others]
        self._ends += chunks.ended
        if chunks.num_open is not None:
            self.num_detokenizing = chunks.num_open

    def wake(self) -> None:
        """Wake some readers and end some rows, and the others in later iterations of the loop.

        Later chunks are merged with unread chunks meanwhile.
        """
        calls, self._calls_to_wake = self._calls_to_wake[:MAX_WOKEN], self._calls_to_wake[MAX_WOKEN:]
        self._bytes_left = MAX_EXTRA_BYTES
        self.end_rows(MAX_ENDED)
        with self._lock:
            for call in calls:
                call.wake()
        if self._calls_to_wake or self._ends:
            asyncio.get_running_loop().call_soon(self.wake)

    def end_rows(self, max_ended: int = sys.maxsize) -> None:
        """End up to ``max_ended`` rows whose ends have arrived."""
        ends, self._ends = self._ends[:max_ended], self._ends[max_ended:]
        ended: list[CallRow] = []
        with self._lock:
            now = time.monotonic()
            for end in ends:
                if (row := self.rows.pop(end.uid, None)) is not None:
                    row.call.end_row(row, end, now)
                    ended.append(row)
        for row in ended:
            self._on_ended(row)
