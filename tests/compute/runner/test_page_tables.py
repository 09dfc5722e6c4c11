"""Page tables of open requests: pages that cannot be are refused, and pages behind a window are not shown to a step."""

from __future__ import annotations

import numpy as np
import pytest

from aioengine.runner.kv_pool import FIRST_PAGE, PADDING_PAGE
from aioengine.runner.page_tables import PageTables
from aioengine.settings.page_groups import PageGroups


def test_pages_that_are_too_many_or_outside_the_pool_are_refused() -> None:
    tables = PageTables(max_rows=1, max_row_pages=2, num_pages=4)
    tables.open(0)
    for pages in ([4], [-1]):
        with pytest.raises(ValueError, match="pages must be below 4"):
            tables.add(0, pages)
    tables.add(0, [0, 3])
    assert tables.pages(0) == [FIRST_PAGE, 3 + FIRST_PAGE]
    with pytest.raises(ValueError, match="a request can have 2 pages, got 3"):
        tables.add(0, [1])


def test_a_step_sees_the_pages_of_its_windows_alone() -> None:
    groups = PageGroups(windows=(None, 2), page_size=2)
    tables = PageTables(max_rows=2, max_row_pages=3, num_pages=10, groups=groups)
    tables.open(1)
    with pytest.raises(ValueError, match="pages must be below 10"):
        tables.add(1, [-2, 0])
    tables.add(1, [0, -1, 1, 4, 2, 5])  # of both groups, page of positions by page of positions
    [whole], [windowed] = tables.of_step(np.array([1]), np.array([4]), 3)
    assert whole.tolist() == [FIRST_PAGE, 1 + FIRST_PAGE, 2 + FIRST_PAGE]
    assert windowed.tolist() == [PADDING_PAGE, 4 + FIRST_PAGE, 5 + FIRST_PAGE]
    [_], [later] = tables.of_step(np.array([1]), np.array([5]), 3)
    assert later.tolist() == [PADDING_PAGE, PADDING_PAGE, 5 + FIRST_PAGE]
