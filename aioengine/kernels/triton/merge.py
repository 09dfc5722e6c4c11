"""Merge two attention results of the same rows over different positions, or add learned sinks, on a GPU.

T tokens, H query heads, E head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from aioengine.kernels.triton.launcher import KernelLauncher, alignments, next_power_of_2
from aioengine.kernels.triton.scores import LOG2_E

if TYPE_CHECKING:
    from torch import Tensor

ROWS = tl.constexpr(16)
"""Heads of tokens per program."""


@triton.jit(do_not_specialize=["num_rows"])
def _merge_kernel(
    out: tl.tensor, weights: tl.tensor, other: tl.tensor, other_weights: tl.tensor, num_rows: tl.tensor,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, COLUMNS: tl.constexpr, SINKS: tl.constexpr,
) -> None:  # fmt: skip
    """Merge ``other`` into the result of each head. SINKS: ``other_weights`` are sinks, whose values are 0."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_there = rows < num_rows
    if SINKS:
        other_weight = tl.load(other_weights + rows % NUM_HEADS, mask=is_there, other=0.0).to(tl.float32) * LOG2_E
    else:
        other_weight = tl.load(other_weights + rows, mask=is_there, other=0.0)
    share = 1.0 / (1.0 + tl.exp2(other_weight - tl.load(weights + rows, mask=is_there, other=0.0)))
    columns = tl.arange(0, COLUMNS)[None, :]
    targets = rows[:, None] * HEAD_SIZE + columns
    inside = is_there[:, None] & (columns < HEAD_SIZE)
    own = tl.load(out + targets, mask=inside, other=0.0)
    if SINKS:
        merged = own.to(tl.float32) * share[:, None]
    else:
        theirs = tl.load(other + targets, mask=inside, other=0.0).to(tl.float32)
        merged = theirs + (own.to(tl.float32) - theirs) * share[:, None]
    tl.store(out + targets, merged.to(own.dtype), mask=inside)


_merge = KernelLauncher(_merge_kernel)


def merge(out: Tensor, weights: Tensor, other: Tensor, other_weights: Tensor) -> None:
    """Merge ``other`` into ``out``, contiguous [T, H, E] each: results of attention over different positions.

    weights, other_weights: [T, H] fp32, log2 of the sum of exponentials.
    """
    _launch(out, weights, other, other_weights, has_sinks=False)


def add_sinks(out: Tensor, weights: Tensor, sinks: Tensor) -> None:
    """Apply the learned sinks [H] to the attention result ``out``, contiguous [T, H, E].

    weights: [T, H] fp32, log2 of the sum of exponentials.
    """
    _launch(out, weights, out, sinks, has_sinks=True)


def _launch(out: Tensor, weights: Tensor, other: Tensor, other_weights: Tensor, *, has_sinks: bool) -> None:
    """Merge into out [T, H, E] and weights [T, H]: see ``_merge_kernel``."""
    num_rows, (num_heads, head_size) = weights.numel(), out.shape[1:]
    tensors = out, weights, other, other_weights
    sizes = num_heads, head_size, next_power_of_2(head_size), has_sinks
    key = out.dtype, other_weights.dtype, sizes, *alignments(*tensors)
    _merge((-(-num_rows // ROWS.value), 1, 1), key, (*tensors, num_rows, *sizes), {"num_warps": 4})
