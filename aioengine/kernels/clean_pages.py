"""Pages of the pool [L, 2, N, K, S, E] lose what is not a finite number, where a mark says so. On a GPU the host need
not know the marks: those of a step in flight will do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor


def reference(pool: Tensor, marks: Tensor, rows: Tensor, page_ids: Tensor) -> None:
    """pool [L, 2, N, K, S, E], marks [S], rows [X, 3], page_ids [Y]: see ``clean_pages``."""
    for place, first, count in rows.tolist():
        if marks[place] < 0:
            pages = page_ids[first : first + count].long()
            for layer in pool:  # one layer at a time bounds the copy
                layer[:, pages] = layer[:, pages].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def clean_pages(pool: Tensor, marks: Tensor, rows: Tensor, page_ids: Tensor) -> None:
    """rows [X, 3] int32: a place in ``marks`` [S] int64, whose number is negative where the pages are to be cleaned,
    where these begin in ``page_ids``, and how many they are.
    """
    if not launcher.serves(pool):
        reference(pool, marks, rows, page_ids)
        return
    from aioengine.kernels.triton.clean_pages import clean

    clean(pool, marks, rows, page_ids)
