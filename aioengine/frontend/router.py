"""From frames to rows: every chunk goes to the slot of its row, and the ends of rows are told on."""

from __future__ import annotations

import asyncio
import time
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable

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

    def __init__(self, lock: threading.RLock) -> None:
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
            for uid, text, new in zip(chunks.uids, chunks.texts, _ids_by_row(chunks), strict=True):
                row = rows.get(uid)
                if row is not None and row.put(text, new):
                    fresh.append(row.output)
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
                row.has_first_token = True
                row.facts.begin(begun)
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


def _ids_by_row(chunks: TextChunks) -> Iterable[int | list[int]]:
    """What each row gets: one id, where all of them get one."""
    token_ids, counts = chunks.token_ids, chunks.counts
    if counts.count(1) == len(counts):  # nearly every frame
        return token_ids
    ends = accumulate(counts, initial=0)
    return (token_ids[start:end] for start, end in pairwise(ends))
