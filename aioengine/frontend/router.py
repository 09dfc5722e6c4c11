"""From frames to rows: every chunk goes to the slot of its row, and the ends of rows are told on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading

    from aioengine.frontend.outputs import RowStream
    from aioengine.protocol.messages import TextChunks


class Router:
    """The rows that the scheduler has, by uid.

    Attributes:
        rows: submitted, and without an end here. num_detokenizing: requests that the detokenizer holds.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self.rows: dict[int, RowStream] = {}
        self.num_detokenizing = 0
        self._lock = lock

    def deliver(self, chunks: TextChunks) -> list[RowStream]:
        """Hand out one frame; returns the rows that it ended."""
        rows = self.rows
        ended: list[RowStream] = []
        with self._lock:
            token_ids = chunks.token_ids
            start = 0
            for uid, text, count in zip(chunks.uids, chunks.texts, chunks.counts, strict=True):
                row = rows.get(uid)
                if row is not None:
                    row.put(text, token_ids[start : start + count])
                start += count
            if chunks.finished:
                now = time.monotonic()
                for finished in chunks.finished:
                    row = rows.pop(finished.uid, None)
                    if row is not None:
                        row.output.end_row(row, finished, now)
                        ended.append(row)
        self.num_detokenizing = chunks.num_open
        return ended
