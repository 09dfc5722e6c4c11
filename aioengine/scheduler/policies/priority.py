"""Priority first: a level counts as having come ten minutes earlier; among equals the nearest deadline, then arrival.

Equals are requests of one priority that arrived in the same ten seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.scheduler.policies._base import NumCached, queue_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aioengine.scheduler.request import Request

HEAD_START_S = 600.0


class PriorityPolicy:
    """By priority, aged; then by deadline; then by arrival."""

    def key(self, request: Request) -> tuple[float, ...]:
        return queue_key(request, HEAD_START_S)

    def candidates(self, waiting: Sequence[Request], num_cached: NumCached) -> Iterable[Request]:
        return waiting


PLUGIN = PriorityPolicy
