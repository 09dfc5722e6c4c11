"""How ranks open each other's inboxes, with inboxes that are only handles."""

from __future__ import annotations

import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from aioengine.layers.ranks import RankGroup
from tests.compute.rank_threads import CPU, rank_threads

MAX_ROWS, NUM_COLUMNS = 3000, 64


class FakeInboxes:
    """failing: the rank and the method that raises."""

    def __init__(
        self,
        failing: tuple[int, str],
        rank: int,
        size: int,
        max_rows: int,
        num_columns: int,
        device: torch.device,
    ) -> None:
        self.failing, self.rank, self.max_rows = failing, rank, max_rows
        self.handles: list[tuple[int]] = []
        self.memory = self

    def share(self) -> tuple[int]:
        time.sleep(0.05 * self.rank)  # rank 0 must not read what rank 1 gave for other inboxes
        self._work("share")
        return (self.rank,)

    def open(self, handles: list[tuple[int]], rank: int) -> None:
        self._work("open")
        self.handles = handles

    def _work(self, name: str) -> None:
        if self.failing == (self.rank, name):
            raise RuntimeError("the GPUs cannot reach each other's memory")


@pytest.mark.parametrize("failing", [(-1, ""), (0, "open"), (1, "share")])
def test_ranks_use_inboxes_if_all_of_them_can(failing: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(Inboxes=partial(FakeInboxes, failing))
    monkeypatch.setitem(sys.modules, "aioengine.kernels.triton.rank_sums", module)
    plain = RankGroup.all_reduce_min

    def on_cpu(group: RankGroup, number: int) -> int:
        group._device = CPU
        return plain(group, number)

    with rank_threads(2) as threads:
        monkeypatch.setattr(RankGroup, "all_reduce_min", on_cpu)

        def open_inboxes(rank: int) -> FakeInboxes | None:
            group = threads.shards[rank].group
            assert group is not None
            group._device = torch.device("cuda")
            group.open_inboxes(MAX_ROWS, NUM_COLUMNS, torch.bfloat16)
            return group._inboxes  # type: ignore[return-value]

        result = threads.call(open_inboxes)
    for inboxes in result:
        if failing[0] >= 0:
            assert inboxes is None
        else:
            assert inboxes is not None
            assert (inboxes.max_rows, inboxes.handles) == (MAX_ROWS, [(0,), (1,)])
