"""FakeRunners of several ranks. Rank 0 shares its tokens with the others, as a broadcast does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.processes.leading_runner import LeadingRunner
from aioengine.processes.runner_process import RankService
from aioengine.testing.fake_runner import FakeModel, FakeRunner, FakeTicket

if TYPE_CHECKING:
    from aioengine.protocol.messages import Control
    from aioengine.protocol.rank_step import RankAdapter, RankStep
    from aioengine.scheduler.plan import NewRow


class _RankRunner(FakeRunner):
    """``tokens``: of all ranks, by uid and position."""

    tokens: dict[tuple[int, int], int]


class _FirstRank(_RankRunner):
    def _token(self, opened: NewRow, checksum: int, position: int) -> int:
        token_id = self.tokens[opened.uid, position] = super()._token(opened, checksum, position)
        return token_id


class _OtherRank(_RankRunner):
    def _token(self, opened: NewRow, checksum: int, position: int) -> int:
        return self.tokens[opened.uid, position]


class RankedFakeRunner(LeadingRunner[FakeTicket]):
    """Several FakeRunners that compute the same steps."""

    def __init__(self, model: FakeModel, num_ranks: int, *, num_pages: int, page_size: int) -> None:
        kinds = [_FirstRank, *[_OtherRank] * (num_ranks - 1)]
        self._ranks = [kind(model, num_pages=num_pages, page_size=page_size) for kind in kinds]
        tokens: dict[tuple[int, int], int] = {}
        for rank in self._ranks:
            rank.tokens = tokens
        self._services = [RankService(rank) for rank in self._ranks[1:]]
        super().__init__(self._ranks[0], self._send_to_ranks)

    def _send_to_ranks(self, message: RankStep | RankAdapter | Control) -> None:
        for service in self._services:
            service.handle([message], 0.0)
        first, *others = self._ranks
        for other in others:
            assert other._rows.keys() == first._rows.keys()
            assert other._slots == first._slots
