"""From frames to rows: every chunk goes to the slot of its row, and the ends of rows are told on."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading

    from aioengine.frontend.outputs import CallOutput, RowStream
    from aioengine.protocol.messages import TextChunks


MAX_WOKEN = 128
"""Readers that are told in one turn of the loop. They read in the next: what they make is gone before the others are
told, so a thousand streams set off no garbage collection at every step, and no turn is long."""


class Router:
    """The rows that the scheduler has, by uid.

    Attributes:
        rows: submitted, and without an end here. num_detokenizing: requests that the detokenizer holds.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self.rows: dict[int, RowStream] = {}
        self.num_detokenizing = 0
        self._lock = lock
        self._fresh: list[CallOutput] = []

    def deliver(self, chunks: TextChunks) -> list[RowStream]:
        """Put one frame into the slots of its rows; returns the rows that it ended. ``wake`` tells their readers."""
        rows, fresh = self.rows, self._fresh
        ended: list[RowStream] = []
        with self._lock:
            self._note(chunks)
            token_ids = chunks.token_ids
            start = 0
            for uid, text, count in zip(chunks.uids, chunks.texts, chunks.counts, strict=True):
                row = rows.get(uid)
                end = start + count
                if row is not None and row.put(text, token_ids[start:end]):
                    fresh.append(row.output)
                start = end
            if chunks.finished:
                now = time.monotonic()
                for finished in chunks.finished:
                    row = rows.pop(finished.uid, None)
                    if row is not None:
                        row.output.end_row(row, finished, now)
                        ended.append(row)
        self.num_detokenizing = chunks.num_open
        return ended

    def _note(self, chunks: TextChunks) -> None:
        """What chunks tell of their request from now on."""
        for begun in chunks.begun:
            if (row := self.rows.get(begun.uid)) is not None:
                row.has_begun = True
                row.facts.begin(begun.num_cached)
        for uid in chunks.preempted:
            if (row := self.rows.get(uid)) is not None:
                row.facts.preempt()

    def wake(self) -> None:
        """Tell some readers what is new, and the others when these have read.

        What frames bring meanwhile is merged with what still waits.
        """
        fresh = self._fresh
        with self._lock:
            for output in fresh[:MAX_WOKEN]:
                output.wake()
        del fresh[:MAX_WOKEN]
        if fresh:
            asyncio.get_running_loop().call_soon(self.wake)
