"""First come, first served. Each level of priority counts as an arrival ten seconds earlier.

Requests that arrived in the same ten seconds are ordered by their nearest deadline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.scheduler.policies._base import NumCached, queue_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aioengine.scheduler.request import Request

HEAD_START_S = 10.0


class FirstComePolicy:
    """Order by arrival."""

    def key(self, request: Request) -> tuple[float, ...]:
        return queue_key(request, HEAD_START_S)

    def candidates(self, waiting: Sequence[Request], num_cached: NumCached) -> Iterable[Request]:
        return waiting


PLUGIN = FirstComePolicy
