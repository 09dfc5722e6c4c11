"""Priority first: each level counts as an arrival ten minutes earlier.

Requests of one priority that arrived in the same ten seconds are ordered by their nearest deadline, then by arrival.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.scheduler.policies._base import NumCached, queue_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aioengine.scheduler.request import Request

HEAD_START_S = 600.0


class PriorityPolicy:
    """Order by aged priority, then deadline, then arrival."""

    def key(self, request: Request) -> tuple[float, ...]:
        return queue_key(request, HEAD_START_S)

    def candidates(self, waiting: Sequence[Request], num_cached: NumCached) -> Iterable[Request]:
        return waiting


PLUGIN = PriorityPolicy
