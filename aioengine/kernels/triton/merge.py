"""Merge two attention results of the same rows over different positions, or add learned sinks, on a GPU.

T tokens, H query heads, E head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from aioengine.kernels.triton.launcher import KernelLauncher, next_power_of_2
from aioengine.kernels.triton.scores import LOG2_E

if TYPE_CHECKING:
    from torch import Tensor

HEADS = 16  # per program


@triton.jit(do_not_specialize=["num_heads"])
def _merge_kernel(
    out: tl.tensor,
    weights: tl.tensor,
    other: tl.tensor,
    other_weights: tl.tensor,
    num_heads: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    heads = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    is_there = heads < num_heads
    gap = tl.load(other_weights + heads, mask=is_there, other=0.0) - tl.load(weights + heads, mask=is_there, other=0.0)
    share = 1.0 / (1.0 + tl.exp2(gap))
    columns = tl.arange(0, COLUMNS)[None, :]
    targets = heads[:, None] * HEAD_SIZE + columns
    inside = is_there[:, None] & (columns < HEAD_SIZE)
    own = tl.load(out + targets, mask=inside, other=0.0)
    theirs = tl.load(other + targets, mask=inside, other=0.0).to(tl.float32)
    merged = theirs + (own.to(tl.float32) - theirs) * share[:, None]
    tl.store(out + targets, merged.to(own.dtype), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _sinks_kernel(
    out: tl.tensor,
    weights: tl.tensor,
    sinks: tl.tensor,
    num_rows: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_there = rows < num_rows
    sink = tl.load(sinks + rows % NUM_HEADS, mask=is_there, other=0.0).to(tl.float32) * LOG2_E
    share = 1.0 / (1.0 + tl.exp2(sink - tl.load(weights + rows, mask=is_there, other=0.0)))
    columns = tl.arange(0, COLUMNS)[None, :]
    targets = rows[:, None] * HEAD_SIZE + columns
    inside = is_there[:, None] & (columns < HEAD_SIZE)
    own = tl.load(out + targets, mask=inside, other=0.0)
    tl.store(out + targets, (own.to(tl.float32) * share[:, None]).to(own.dtype), mask=inside)


_merge = KernelLauncher(_merge_kernel)
_sinks = KernelLauncher(_sinks_kernel)


def merge(out: Tensor, weights: Tensor, other: Tensor, other_weights: Tensor) -> None:
    """Merge ``other`` into ``out``, contiguous [T, H, E] each: results of attention over different positions.

    weights, other_weights: [T, H] fp32, log2 of the sum of exponentials.
    """
    num_heads, head_size = weights.numel(), out.shape[-1]
    tensors = out, weights, other, other_weights
    sizes = head_size, next_power_of_2(head_size), HEADS
    key = (out.dtype, sizes, *(tensor.data_ptr() % 16 for tensor in tensors))
    _merge((-(-num_heads // HEADS), 1, 1), key, (*tensors, num_heads, *sizes), {"num_warps": 4})


def add_sinks(out: Tensor, weights: Tensor, sinks: Tensor) -> None:
    """Apply the learned sinks [H] to the attention result ``out``, contiguous [T, H, E].

    weights: [T, H] fp32, log2 of the sum of exponentials.
    """
    num_rows, (num_heads, head_size) = weights.numel(), out.shape[1:]
    tensors = out, weights, sinks
    sizes = num_heads, head_size, next_power_of_2(head_size), HEADS
    key = (out.dtype, sinks.dtype, sizes, *(tensor.data_ptr() % 16 for tensor in tensors))
    _sinks((-(-num_rows // HEADS), 1, 1), key, (*tensors, num_rows, *sizes), {"num_warps": 4})
