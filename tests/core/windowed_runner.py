"""A FakeRunner for page groups: each row reads the pages in the window of its tokens, in every group."""

from __future__ import annotations

import zlib
from array import array
from typing import TYPE_CHECKING

from aioengine.testing.fake_runner import FakeModel, FakeRunner, FakeTicket

if TYPE_CHECKING:
    from aioengine.scheduler.plan import StepPlan
    from aioengine.settings.page_groups import PageGroups
    from aioengine.testing.fake_runner import _FakeRow
    from aioengine.testing.faults import Faults


class WindowedFakeRunner(FakeRunner):
    """A slot has the checksum of all tokens up to its own. A token that reads another checksum is an error."""

    def __init__(self, model: FakeModel, groups: PageGroups, *, num_pages: int, faults: Faults | None = None) -> None:
        super().__init__(model, num_pages=num_pages, page_size=groups.page_size, faults=faults)
        self._groups = groups
        self._known: dict[int, list[int]] = {}
        self._newest = 0

    def launch(self, plan: StepPlan) -> FakeTicket:
        for opened in plan.new_rows:
            self._known[opened.uid] = list(opened.token_ids)
        return super().launch(plan)

    def _write(self, uid: int, held: _FakeRow, start: int, token_ids: list[int]) -> None:
        tokens = self._known[uid] = self._known[uid][:start] + token_ids
        assert len(tokens) == start + len(token_ids)
        checksums = [0]
        for token_id in tokens:
            checksums.append(zlib.crc32(array("q", [token_id]), checksums[-1]))
        size, num_groups = self._groups.page_size, self._groups.num_groups
        assert len(held.pages) % num_groups == 0
        for group, window in enumerate(self._groups.windows):
            pages = held.pages[group::num_groups]
            for position in range(start, len(tokens)):
                page = pages[position // size]
                assert page >= 0
                self._slots[page * size + position % size] = checksums[position + 1]
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, start):
                page = pages[position // size]
                assert page >= 0, f"request {uid} sees position {position}, which was given back"
                checksum = self._slots[page * size + position % size]
                assert checksum == checksums[position + 1], f"request {uid} sees another token at {position}"
        if self._faults is not None:
            for token_id in token_ids:
                self._faults.on_token(token_id)
        self._newest = checksums[-1]

    def _checksum(self, pages: list[int], num_tokens: int) -> int:
        return self._newest
