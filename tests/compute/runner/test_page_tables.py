"""Page tables of open requests."""

from __future__ import annotations

import numpy as np

from aioengine.runner.kv_pool import FIRST_PAGE, PADDING_PAGE
from aioengine.runner.page_tables import PageTables
from aioengine.settings.page_groups import PageGroups


def test_pages_are_appended_after_the_padding_page() -> None:
    tables = PageTables(max_rows=1, max_row_pages=2)
    tables.open(0)
    tables.add(0, [0, 3])
    assert tables.pages(0) == [FIRST_PAGE, 3 + FIRST_PAGE]


def test_a_step_reads_only_the_pages_of_its_windows() -> None:
    groups = PageGroups(windows=(None, 2), page_size=2)
    tables = PageTables(max_rows=2, max_row_pages=3, groups=groups)
    tables.open(1)
    tables.add(1, [0, -1, 1, 4, 2, 5])  # pages of both groups, interleaved
    [whole], [windowed] = tables.of_step(np.array([1]), np.array([4]), 3)
    assert whole.tolist() == [FIRST_PAGE, 1 + FIRST_PAGE, 2 + FIRST_PAGE]
    assert windowed.tolist() == [PADDING_PAGE, 4 + FIRST_PAGE, 5 + FIRST_PAGE]
    [_], [later] = tables.of_step(np.array([1]), np.array([5]), 3)
    assert later.tolist() == [PADDING_PAGE, PADDING_PAGE, 5 + FIRST_PAGE]
