"""Deadlines: which requests are out of time. A heap, so asking costs nothing while nobody is."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from aioengine.protocol.messages import Limits
    from aioengine.scheduler.request import Request

SPARE_ENTRIES = 256  # entries of ended requests that may lie about before they are swept


class Deadlines:
    """The deadlines of the living requests; entries of ended ones are skipped, and swept when they are many."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []

    def add(self, uid: int, limits: Limits) -> None:
        kinds = (
            (limits.deadline, "total"),
            (limits.queue_deadline, "queue"),
            (limits.first_token_deadline, "first_token"),
        )
        for time, kind in kinds:
            if time is not None:
                heapq.heappush(self._heap, (time, uid, kind))

    def next_time(self, requests: dict[int, Request]) -> float | None:
        """When the next deadline of a living request passes; None: there is none."""
        heap = self._heap
        while heap and not _applies(requests.get(heap[0][1]), heap[0][2]):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def take_expired(self, now: float, requests: dict[int, Request]) -> list[tuple[Request, str]]:
        """The requests whose time is over, each once, and which deadline it was."""
        expired: dict[int, tuple[Request, str]] = {}
        heap = self._heap
        while heap and heap[0][0] <= now:
            _, uid, kind = heapq.heappop(heap)
            request = requests.get(uid)
            if request is not None and _applies(request, kind):
                expired.setdefault(uid, (request, kind))
        return list(expired.values())

    def sweep(self, living: Collection[int]) -> None:
        """Forget the entries of ended requests, once they are the greater part."""
        if len(self._heap) > 4 * len(living) + SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[1] in living]
            heapq.heapify(self._heap)


def _applies(request: Request | None, kind: str) -> bool:
    if request is None:
        return False
    if kind == "queue":
        return request.marks.admitted_at is None
    return kind == "total" or not request.marks.is_opened
