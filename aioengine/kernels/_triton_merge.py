"""Two results of attention over different positions, put together: R rows, H heads, E head size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from aioengine.kernels._triton import Launcher, next_power_of_2

if TYPE_CHECKING:
    from torch import Tensor

HEADS = 8


@triton.jit
def _merge_kernel(
    out: tl.tensor,
    weights: tl.tensor,
    other: tl.tensor,
    other_weights: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = heads < NUM_HEADS
    marks = tl.program_id(0).to(tl.int64) * NUM_HEADS + heads
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = is_head[:, None] & (columns < HEAD_SIZE)
    places = marks[:, None] * HEAD_SIZE + columns
    own = tl.load(weights + marks, mask=is_head, other=0.0)
    theirs = tl.load(other_weights + marks, mask=is_head, other=0.0)
    highest = tl.maximum(own, theirs)
    own = tl.exp2(own - highest)
    theirs = tl.exp2(theirs - highest)
    share = (theirs / (own + theirs))[:, None]
    values = tl.load(out + places, mask=inside, other=0.0)
    added = tl.load(other + places, mask=inside, other=0.0).to(tl.float32)
    # rows without positions in the other part have a weight of zero there, and what stands there may be anything
    merged = tl.where(share > 0.0, values.to(tl.float32) * (1.0 - share) + added * share, values.to(tl.float32))
    tl.store(out + places, merged.to(values.dtype), mask=inside)


_merge = Launcher(_merge_kernel)


def merge(out: Tensor, weights: Tensor, other: Tensor, other_weights: Tensor) -> None:
    """``out`` [R, H, E] becomes what attention over the positions of both gives. The weights [R, H], fp32, are the
    logarithms to base 2 of the sums of exponentials; minus infinity in ``other_weights``: no positions.
    """
    num_rows, num_heads, head_size = out.shape
    sizes = num_heads, head_size, next_power_of_2(head_size), HEADS
    tensors = out, weights, other, other_weights
    key = (out.dtype, sizes, *(tensor.data_ptr() % 16 for tensor in tensors))
    _merge((num_rows, -(-num_heads // HEADS), 1), key, (*tensors, *sizes), {"num_warps": 4})
