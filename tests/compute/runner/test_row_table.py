"""The tables of open requests."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest
import torch

from aioengine.protocol.messages import Sampling
from aioengine.runner.page_tables import PageTables
from aioengine.runner.rows import RowTable
from aioengine.scheduler.plan import NewRow


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_row_table_uses_memory_only_for_used_rows() -> None:
    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = held()
    table = RowTable(
        page_tables=PageTables(max_rows=16_384, max_row_pages=4096),
        num_embeddings=9,
        device=torch.device("cpu"),
        processors=(),
        max_rows=16_384,
    )
    table.open(NewRow(5, Sampling(0), 1, [1], [7, 8]))
    assert table.page_tables.tables.nbytes == 256 << 20
    assert held() - before < 64 << 20
    assert table.pages(5) == [8, 9], "behind the padding page"
    assert not table.page_tables.tables[0][table.requests[5].row_index, 2:].any()


def test_row_of_a_closed_request_is_reused() -> None:
    table = RowTable(
        page_tables=PageTables(max_rows=2, max_row_pages=4),
        num_embeddings=9,
        device=torch.device("cpu"),
        processors=(),
        max_rows=2,
    )
    place = table.last_tokens.data_ptr()
    for uid in (1, 2):
        table.open(NewRow(uid, Sampling(0), 1, [1], [uid]))
    table.close(1)
    table.open(NewRow(3, Sampling(0), 1, [1], [3]))
    assert table.last_tokens.data_ptr() == place
