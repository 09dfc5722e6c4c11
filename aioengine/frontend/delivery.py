"""Delivery of the processes' output: chunks to their rows, and what is done about readers that do not read.

By default nothing: unread output is merged into one piece, which grows by about 50 bytes with each token and ends with
the request. Slow readers are found by looking at all streams now and then; reading and writing cost nothing more.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from aioengine.frontend.outputs import Wants
from aioengine.protocol.messages import FinishCode

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection

    from aioengine.config import DeliveryConfig
    from aioengine.frontend.call_lifecycle import CallLifecycle
    from aioengine.frontend.calls import Call
    from aioengine.frontend.outputs import CallOutput, Place, RowStream
    from aioengine.protocol.messages import TextChunks


MAX_WOKEN = 128
"""Readers that are woken in one turn of the loop. They read in the next, so the objects that they make are freed before
the others are woken: a thousand streams trigger no garbage collection at every step, and no turn is long."""


class Router:
    """Puts chunks into their rows, and wakes their readers. On the engine's loop.

    Attributes:
        rows: ``Calls.rows``. num_detokenizing: requests that the detokenizer holds.
    """

    def __init__(self, rows: dict[int, RowStream], lock: threading.RLock) -> None:
        self.rows = rows
        self.num_detokenizing = 0
        self._lock = lock
        self._fresh: list[CallOutput] = []

    def deliver(self, chunks: TextChunks) -> list[RowStream]:
        """Put the chunks of one frame into their rows; returns the rows that it ended. ``wake`` wakes their readers."""
        rows, fresh = self.rows, self._fresh
        ended: list[RowStream] = []
        tokens = chunks.tokens
        with self._lock:
            self._note(chunks)
            for uid, text, new in zip(tokens.uids, chunks.texts, tokens.rows(), strict=True):
                row = rows.get(uid)
                if row is not None and row.put(text, new):
                    fresh.append(row.output)
            if chunks.ended:
                now = time.monotonic()
                for finished in chunks.ended:
                    row = rows.pop(finished.uid, None)
                    if row is not None:
                        row.output.end_row(row, finished, now)
                        ended.append(row)
        if chunks.num_open is not None:
            self.num_detokenizing = chunks.num_open
        return ended

    def _note(self, chunks: TextChunks) -> None:
        """Note in the rows what holds for all their chunks from now on."""
        for first_token in chunks.first_tokens:
            if (row := self.rows.get(first_token.uid)) is not None:
                row.has_first_token = True
                row.facts.begin(first_token)
        for uid in chunks.preempted:
            if (row := self.rows.get(uid)) is not None:
                row.facts.preempt()

        for extra in chunks.tokens.extras:
            if (row := self.rows.get(extra.uid)) is not None:
                row.put_extra(extra)

    def wake(self) -> None:
        """Wake some readers, and the others when these have read.

        Chunks of later frames are merged with those that still wait.
        """
        fresh = self._fresh
        with self._lock:
            for output in fresh[:MAX_WOKEN]:
                output.cursor.wake()
        del fresh[:MAX_WOKEN]
        if fresh:
            asyncio.get_running_loop().call_soon(self.wake)


NUM_LOOKS: Final = 4
"""Checks in ``slow_reader_timeout``: a reader was away for up to a quarter more of it before anything happens."""


class SlowReaders:
    """Suspends or ends calls whose readers stay away; each once, until it is read again. On the engine's loop."""

    def __init__(
        self, config: DeliveryConfig, open_calls: Callable[[], Collection[Call]], lifecycle: CallLifecycle
    ) -> None:
        self._config = config
        self._open_calls = open_calls
        self._lifecycle = lifecycle
        self._places: dict[CallOutput, tuple[Place, int]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Check the readers now and then, unless slow ones are left alone."""
        if self._config.slow_reader != "coalesce":
            every_s = self._config.slow_reader_timeout_s / NUM_LOOKS
            self._timer = asyncio.get_running_loop().call_later(every_s, self._look)

    def release(self) -> None:
        """Suspend no call any more, and resume the suspended ones: the engine waits for their ends."""
        if self._config.slow_reader == "pause":
            self.stop()
            for call in list(self._open_calls()):
                if call.output.wants is Wants.READS:
                    self._lifecycle.on_read(call.output)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _look(self) -> None:
        places: dict[CallOutput, tuple[Place, int]] = {}
        for call in list(self._open_calls()):
            place = call.output.place
            if place is None:
                continue
            before, num_looks = self._places.get(call.output, (None, 0))
            num_looks = num_looks + 1 if before == place else 0
            places[call.output] = place, num_looks
            if num_looks == NUM_LOOKS:
                self._act(call, place)
        self._places = places
        self.watch()

    def _act(self, call: Call, place: Place) -> None:
        if self._config.slow_reader == "pause":
            self._lifecycle.suspend(call, place)
        else:
            message = (
                f"its reader stayed away for longer than slow_reader_timeout={self._config.slow_reader_timeout_s:g}"
            )
            self._lifecycle.end_all([call], FinishCode.ABORT, message)
