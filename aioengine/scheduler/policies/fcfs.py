"""First come, first served: a level of priority counts as having come ten seconds earlier.

Of those who came in the same ten seconds, who has the nearest deadline goes first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.scheduler.policies._base import NumCached, queue_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aioengine.scheduler.request import Request

HEAD_START_S = 10.0


class FirstComePolicy:
    """By arrival."""

    def key(self, request: Request) -> tuple[float, ...]:
        return queue_key(request, HEAD_START_S)

    def candidates(self, waiting: Sequence[Request], num_cached: NumCached) -> Iterable[Request]:
        return waiting


PLUGIN = FirstComePolicy
