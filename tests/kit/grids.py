"""Grids of test cases. Most of them are marked slow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def grid(rows: Sequence[tuple[Any, ...]], columns: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return all pairs of a row and a column for ``parametrize``. Each value is in a pair that is not slow."""
    quick = {(place % len(rows), place % len(columns)) for place in range(max(len(rows), len(columns)))}
    return [
        pytest.param(*row, *column, marks=() if (i, j) in quick else pytest.mark.slow)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]
