"""The row counts of the graphs."""

from __future__ import annotations

import itertools

import pytest

from aioengine.runner.ladder import ladder


@pytest.mark.parametrize("max_rows", [1, 2, 3, 16, 100, 256, 300, 1024])
def test_ladder(max_rows: int) -> None:
    sizes = ladder(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    assert all(after - before <= max(4, before // 2) for before, after in itertools.pairwise(sizes))


def test_no_graphs() -> None:
    assert ladder(0) == []
