"""Set NaN and inf to 0 in pages of the KV pool, for rows whose mark is negative.

On a GPU the host does not read the marks, so these may be the result of a step that is still in flight.
L layers, N pages of the pool, K kv heads, S page size, E head size, X rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor


def reference(pool: Tensor, marks: Tensor, rows: Tensor, page_ids: Tensor) -> None:
    """pool [L, 2, N, K, S, E], marks [M], rows [X, 3], page_ids [Y]: see ``clean_pages``."""
    for mark, first, count in rows.tolist():
        if marks[mark] < 0:
            pages = page_ids[first : first + count].long()
            for layer in pool:  # one layer at a time bounds the copy
                layer[:, pages] = layer[:, pages].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def clean_pages(pool: Tensor, marks: Tensor, rows: Tensor, page_ids: Tensor) -> None:
    """Set NaN and inf to 0 in the pages of the rows whose mark is negative.

    Args:
        pool: [L, 2, N, K, S, E].
        marks: [M] int64.
        rows: [X, 3] int32: the index of the row's mark, the start of its pages in ``page_ids``, and their number.
        page_ids: [Y] int32.
    """
    if not launcher.serves(pool):
        reference(pool, marks, rows, page_ids)
        return
    from aioengine.kernels.triton.clean_pages import clean

    clean(pool, marks, rows, page_ids)
