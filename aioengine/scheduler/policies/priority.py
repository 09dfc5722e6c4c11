"""Priority first: a level counts as having come ten minutes earlier; among equals the nearest deadline, then arrival.

Equals are requests of one priority that arrived in the same ten seconds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from aioengine.scheduler.queue_order import NumCached, head_start_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aioengine.scheduler.request import Request

HEAD_START_S = 600.0
SAME_TIME_S = 10.0


class PriorityPolicy:
    """By priority, aged; then by deadline; then by arrival."""

    def key(self, request: Request) -> tuple[float, ...]:
        deadline = request.submit.limits.deadline
        return (
            head_start_key(request, HEAD_START_S) // SAME_TIME_S,
            -request.submit.priority,
            math.inf if deadline is None else deadline,
            request.submit.arrived_at,
        )

    def candidates(self, waiting: Sequence[Request], num_cached: NumCached) -> Iterable[Request]:
        return waiting


PLUGIN = PriorityPolicy
