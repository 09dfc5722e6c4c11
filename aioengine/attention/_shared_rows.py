"""Find rows of a step with prompts that start with the same pages. R rows, P pages of the longest row."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from aioengine.kernels.arrays import Ints32

MIN_ROWS = 4
MIN_PAIRS = 1 << 20
"""Minimum of queries times shared positions: with fewer, two more kernels per layer cost more time than they save."""
MAX_POSITIONS = 8192
"""Maximum of shared positions, because their keys and values are copied."""


class SharedRows(NamedTuple):
    """Adjacent rows, ``first`` to ``end`` - 1, that start with the same ``num_pages`` full pages."""

    first: int
    end: int
    num_pages: int


def num_common(pages_RP: Ints32) -> int:
    """Return the number of leading columns of [R, P] in which all rows are equal."""
    differs_P = (pages_RP != pages_RP[0]).any(0)
    return int(differs_P.argmax()) if differs_P.any() else pages_RP.shape[1]


def find_shared(pages_RP: Ints32, query_lengths: Ints32, kv_lengths: Ints32, page_size: int) -> SharedRows | None:
    """Return the rows with the largest shared prefix, for page tables [R, P] and lengths [R]; None: too little."""
    if len(pages_RP) < MIN_ROWS:
        return None
    num_full = np.minimum((kv_lengths - query_lengths) // page_size, MAX_POSITIONS // page_size)
    first_pages = np.where(num_full > 0, pages_RP[:, 0], -1)
    bounds = [0, *(np.flatnonzero(np.diff(first_pages)) + 1).tolist(), len(pages_RP)]
    best, most_pairs = None, MIN_PAIRS - 1
    for first, end in pairwise(bounds):
        if end - first >= MIN_ROWS and first_pages[first] >= 0:
            num_pages = num_common(pages_RP[first:end, : num_full[first:end].min()])
            num_pairs = num_pages * page_size * int(query_lengths[first:end].sum())
            if num_pairs > most_pairs:
                best, most_pairs = SharedRows(first, end, num_pages), num_pairs
    return best
