"""Set NaN and inf to 0 in KV pages on a GPU. The programs of rows with a token id >= 0 return immediately.

L layers, N pages of the pool, K kv heads, S page size, E head size, X rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from aioengine.kernels.triton.launcher import KernelLauncher, alignments

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = tl.constexpr(1024)


@triton.jit(do_not_specialize=["part_stride"])
def _clean_kernel(
    pool: tl.tensor, marks: tl.tensor, rows: tl.tensor, page_ids: tl.tensor, part_stride: tl.tensor,
    PAGE_ELEMENTS: tl.constexpr,
) -> None:  # fmt: skip
    row = rows + 3 * tl.program_id(0)
    if tl.load(marks + tl.load(row)) < 0:
        part = pool + tl.program_id(1) * part_stride.to(tl.int64)
        ids = page_ids + tl.load(row + 1)
        for index in range(tl.load(row + 2)):
            page = part + tl.load(ids + index).to(tl.int64) * PAGE_ELEMENTS
            for first in range(0, PAGE_ELEMENTS, BLOCK):
                offsets = first + tl.arange(0, BLOCK)
                inside = offsets < PAGE_ELEMENTS
                elements = tl.load(page + offsets, mask=inside, other=0.0)
                is_finite = tl.abs(elements.to(tl.float32)) < float("inf")
                tl.store(page + offsets, tl.where(is_finite, elements, 0.0), mask=inside)


_clean = KernelLauncher(_clean_kernel)


def clean(pool: Tensor, token_ids: Tensor, rows: Tensor, page_ids: Tensor) -> None:
    """See ``kernels.clean_pages``: pool [L, 2, N, K, S, E], token_ids [M], rows [X, 3], page_ids [Y]."""
    num_layers, num_sides, _, num_kv_heads, page_size, head_size = pool.shape
    page_elements = num_kv_heads * page_size * head_size
    tensors = pool, token_ids, rows, page_ids
    key = (pool.dtype, page_elements, *alignments(*tensors))
    arguments = (*tensors, pool.stride(1), page_elements)
    _clean((rows.shape[0], num_layers * num_sides, 1), key, arguments, {"num_warps": 4})
