"""How few rows and columns the products of ``attention/torch.py`` may have without changing a bit of any row.

The library adds up a row of a small product in another way than a row of a large one, and which sizes are small is
its own affair. So it is found out by trying, once for each head size, type and number of threads.

Letters: B products of a batch, M query rows, C positions of a chunk, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch

from aioengine.attention._chunks import CHUNK, MASKED, ROWS, attend_only, chunk_scores

TRIED_BATCHES = (1, 2, 5)
TRIED_ROWS = (4, 8, ROWS)
TRIED_TIMES = (1, 2, 3, 5, 8)
TRIED_COLUMNS = (64, 128, CHUNK)
MOST_ROWS = 128


@dataclass(frozen=True, slots=True)
class Padding:
    """``rows``: query rows come in multiples of this. ``columns``: so do the positions of a chunk."""

    rows: int
    columns: int


@lru_cache(maxsize=64)
def find_padding(head_size: int, dtype: torch.dtype, num_threads: int) -> Padding:
    """The smallest with which every row is seen to be the same bits as in whole chunks of many rows.

    ``num_threads`` only tells apart what was tried with other numbers of threads.
    """
    rows = next((rows for rows in TRIED_ROWS[:-1] if _agree(Padding(rows, CHUNK), head_size, dtype)), ROWS)
    columns = next((size for size in TRIED_COLUMNS[:-1] if _agree(Padding(rows, size), head_size, dtype)), CHUNK)
    return Padding(rows, columns)


def _agree(padding: Padding, head_size: int, dtype: torch.dtype) -> bool:
    """Whether products in multiples of the padding give the rows that whole ones give."""
    most, generator = max(TRIED_BATCHES), torch.Generator().manual_seed(0)
    queries = torch.randn(most, MOST_ROWS, head_size, generator=generator)
    keys = torch.randn(most, CHUNK, head_size, generator=generator).to(dtype).float()
    values = torch.randn(most, CHUNK, head_size, generator=generator).to(dtype)
    counts = (*(padding.rows * times for times in TRIED_TIMES), MOST_ROWS)
    for width in range(padding.columns, CHUNK + 1, padding.columns):
        hidden = (torch.arange(CHUNK) >= width) * MASKED
        expected = attend_only(chunk_scores(queries, keys, hidden, (most, -1)), values)
        scores = chunk_scores(queries, keys, None, (most, -1))[..., :width]
        for batch, count in product(TRIED_BATCHES, counts):
            few = chunk_scores(queries[:batch, :count].contiguous(), keys[:batch, :width], None, (batch, -1))
            if not torch.equal(few, scores[:batch, :count]):
                return False
            if not torch.equal(attend_only(few, values[:batch, :width]), expected[:batch, :count]):
                return False
    return True
