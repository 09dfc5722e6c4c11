"""Split-KV: divide the positions of decode rows among the programs of a GPU. R rows, X entries for splits."""

from __future__ import annotations

import numpy as np

from aioengine.kernels.arrays import Ints32

ENOUGH_PROGRAMS = 512
"""Number of programs that keeps a GPU busy. A program computes a split for one kv head."""
MAX_SPLITS = 32
"""Maximum splits of one row, because one program merges them."""
STEP = 128
"""Positions that a program loads at a time. Splits start at multiples of this."""
COLUMNS = 5
"""Rows of the result of ``plan_splits``."""


def max_splits(num_rows: int, num_kv_heads: int) -> int:
    """Return the number of entries for ``num_rows`` rows of any length: a multiple of 16, to use one specialization."""
    num_more = min(-(-ENOUGH_PROGRAMS // num_kv_heads), num_rows * (MAX_SPLITS - 1))
    return -(-(num_rows + num_more) // 16) * 16


def plan_splits(lengths: Ints32, num_entries: int, window: int | None = None) -> Ints32:
    """Divide rows of ``lengths`` [R] positions into splits; with a ``window``, only the last positions of each row.

    Returns:
        [COLUMNS, X]: row, begin and end of each split, number of splits of the row, index of the row's first split. The
        splits are about equally long. Splits of a row are adjacent, the longest rows come first. The row of an unused
        entry is -1.
    """
    hidden = None if window is None else np.maximum(lengths - window, 0)
    if hidden is not None:
        lengths = lengths - hidden
    spare = num_entries - len(lengths)
    min_size = max(-(-int(lengths.sum()) // spare), -(-int(lengths.max()) // MAX_SPLITS))
    counts = -(-lengths // (-(-min_size // STEP) * STEP))
    sizes = -(-lengths // (counts * STEP)) * STEP
    counts = -(-lengths // sizes)
    order = np.argsort(-sizes, kind="stable")
    rows = np.repeat(order, counts[order])
    num_splits = len(rows)
    indices = np.arange(num_splits)
    firsts = np.empty(len(lengths), dtype=np.int64)
    firsts[order] = np.cumsum(counts[order]) - counts[order]
    begins = (indices - firsts[rows]) * sizes[rows]
    splits = np.full((COLUMNS, num_entries), -1, dtype=np.int32)
    ends = np.minimum(begins + sizes[rows], lengths[rows])
    splits[:, :num_splits] = rows, begins, ends, counts[rows], firsts[rows]
    if hidden is not None:
        splits[1:3, :num_splits] += hidden[rows]
    return splits
