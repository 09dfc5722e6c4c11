"""First come, first served: a level of priority counts as having come ten seconds earlier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.scheduler.queue_order import NumCached, head_start_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aioengine.scheduler.request import Request

HEAD_START_S = 10.0


class FirstComePolicy:
    """By arrival."""

    def key(self, request: Request) -> tuple[float, ...]:
        return (head_start_key(request, HEAD_START_S),)

    def candidates(self, waiting: Sequence[Request], num_cached: NumCached) -> Iterable[Request]:
        return waiting


PLUGIN = FirstComePolicy
