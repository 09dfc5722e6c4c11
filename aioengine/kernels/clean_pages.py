"""Set NaN and inf to 0 in the KV pages of failed rows. A row has failed if its sampled token id is negative.

On a GPU, the kernel reads the token ids. The host does not need them, so the step may still be in flight.

L layers, N pages of the pool, K kv heads, S page size, E head size, M rows of the step, X rows that may be cleaned, Y
pages of these rows.
"""

from __future__ import annotations

from torch import Tensor

from aioengine.kernels.triton import launcher


def clean_layer(layer: Tensor, pages: Tensor) -> None:
    """Set NaN and inf to 0 in these pages [Y] of a layer [2, N, K, S, E], with torch."""
    layer[:, pages] = layer[:, pages].float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).to(layer.dtype)


def clean_pages(pool: Tensor, token_ids: Tensor, rows: Tensor, page_ids: Tensor) -> None:
    """Set NaN and inf to 0 in the pages of the rows with a negative token id.

    Args:
        pool: [L, 2, N, K, S, E].
        token_ids: [M] int64, the result of the step.
        rows: [X, 3] int32. Columns: index in ``token_ids``, start of the row's pages in ``page_ids``, number of pages.
        page_ids: [Y] int32.
    """
    if launcher.supports(pool):
        from aioengine.kernels.triton.pages import clean

        clean(pool, token_ids, rows, page_ids)
        return
    for index, first, count in rows.tolist():
        if token_ids[index] < 0:
            pages = page_ids[first : first + count].long()
            for layer in pool:  # layer by layer, to limit the size of the copy
                clean_layer(layer, pages)
