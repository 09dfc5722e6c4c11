"""The deadlines of requests, in a heap: checking for expired deadlines costs nothing if there are none."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping

from aioengine.scheduler.request import Request

SPARE_ENTRIES = 256  # deadlines of ended requests that may stay in the heap


class Deadlines:
    """The deadlines of active requests. Entries of ended requests are skipped, and removed if there are many."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, str]] = []

    def add(self, uid: int, deadlines: Mapping[str, float], open_uids: Collection[int]) -> None:
        """Add the deadlines of a request. If most entries are of ended requests, remove these.

        open_uids: of all open requests.
        """
        for kind, time in deadlines.items():
            heapq.heappush(self.heap, (time, uid, kind))
        if len(self.heap) > 4 * len(open_uids) + SPARE_ENTRIES:
            self.heap = [entry for entry in self.heap if entry[1] in open_uids]
            heapq.heapify(self.heap)

    def next_time(self, requests: dict[int, Request]) -> float | None:
        """Return the time of the next deadline, or None."""
        heap = self.heap
        while heap and not _applies(requests.get(heap[0][1]), heap[0][2]):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def take_expired(self, now: float, requests: dict[int, Request]) -> list[tuple[Request, str]]:
        """Remove and return the requests with an expired deadline, each once, with the name of the deadline."""
        expired: dict[int, tuple[Request, str]] = {}
        heap = self.heap
        while heap and heap[0][0] <= now:
            _, uid, kind = heapq.heappop(heap)
            request = requests.get(uid)
            if request is not None and _applies(request, kind):
                expired.setdefault(uid, (request, kind))
        return list(expired.values())


def _applies(request: Request | None, kind: str) -> bool:
    if request is None:
        return False
    if kind == "queue":
        return request.admitted_at is None
    return kind == "total" or not request.is_text_open
