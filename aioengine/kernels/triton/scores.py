"""The softmax of attention, block after block, and its options: sliding windows, soft caps, learned sinks.

Scores are scaled by log2(e), so that weights are powers of 2. G query rows, H query heads, E head size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(-1.0e30)
"""Score of a position that a query row does not attend to."""


class ScoreRules(NamedTuple):
    """The features of one layer; None: not used.

    Attributes:
        window: number of positions that a token attends to, including its own.
        soft_cap: as in ``AttentionShape``.
        sinks: [H], as in ``AttentionShape``.
    """

    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None

    def factor(self, scale: float) -> float:
        """Return the factor of dot products; with a cap, as ``capped`` needs it."""
        return scale / math.log(2) * (1.0 if self.soft_cap is None else 2.0 / self.soft_cap)

    @property
    def cap(self) -> float:
        """Return the constant CAP of the kernels; 0.0: no cap."""
        return 0.0 if self.soft_cap is None else self.soft_cap / math.log(2)

    @property
    def sinks_key(self) -> object:
        """Return the part of a ``KernelLauncher`` key that depends on the sinks."""
        return None if self.sinks is None else (self.sinks.dtype, self.sinks.data_ptr() % 16)


NO_RULES = ScoreRules()


@triton.jit
def capped(products: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """Return ``CAP * tanh(x)`` for products = 2 x * log2(e)."""
    return CAP - 2.0 * CAP / (tl.exp2(products) + 1.0)


@triton.jit
def nothing_attended(ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the highest score, sum of weights and weighted values before the first position."""
    highest = tl.full((ROWS,), MASKED, tl.float32)
    return highest, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)


@triton.jit
def softmax_step(
    scores: tl.tensor, highest: tl.tensor, total: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Add a block of positions to the softmax. Return the weights of these positions, the factor by which the previous
    weighted values must be multiplied, the new highest score and the new sum of weights.
    """
    higher = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(highest - higher)
    return weights, shrink, higher, tl.fma(total, shrink, tl.sum(weights, 1))


@triton.jit
def merged(
    highest: tl.tensor,
    total: tl.tensor,
    sums: tl.tensor,
    split_highest: tl.tensor,
    split_total: tl.tensor,
    split_sums: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Merge the next split into the result of the previous splits. FMAs are explicit, so that the compiler cannot fuse
    operations differently in two kernels.
    """
    higher = tl.maximum(highest, split_highest)
    shrink = tl.exp2(highest - higher)
    weight = tl.exp2(split_highest - higher)
    total = tl.fma(split_total, weight, total * shrink)
    sums = tl.fma(split_sums, tl.broadcast_to(weight[:, None], sums.shape), sums * shrink[:, None])
    return higher, total, sums


@triton.jit
def store_split(
    split_sums: tl.tensor,
    split_marks: tl.tensor,
    targets: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    sums: tl.tensor,
    is_head: tl.tensor,
    VALUE_SIZE: tl.constexpr,
) -> None:
    """Store the result of a split of a row. targets: [G] indices of (row, split, head)."""
    columns = tl.arange(0, sums.shape[1])[None, :]
    inside = is_head[:, None] & (columns < VALUE_SIZE)
    tl.store(split_sums + targets[:, None] * VALUE_SIZE + columns, sums, mask=inside)
    tl.store(split_marks + 2 * targets, highest, mask=is_head)
    tl.store(split_marks + 2 * targets + 1, total, mask=is_head)


@triton.jit
def with_split(
    highest: tl.tensor,
    total: tl.tensor,
    sums: tl.tensor,
    split_sums: tl.tensor,
    split_marks: tl.tensor,
    sources: tl.tensor,
    is_head: tl.tensor,
    VALUE_SIZE: tl.constexpr,
    CACHE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Merge the stored split of each head into the result of the previous splits. sources: [G], see ``store_split``.
    CACHE: cache modifier of the loads.
    """
    split_highest = tl.load(split_marks + 2 * sources, mask=is_head, other=0.0, cache_modifier=CACHE)
    split_total = tl.load(split_marks + 2 * sources + 1, mask=is_head, other=1.0, cache_modifier=CACHE)
    columns = tl.arange(0, sums.shape[1])[None, :]
    pointers = split_sums + sources[:, None] * VALUE_SIZE + columns
    split = tl.load(pointers, mask=is_head[:, None] & (columns < VALUE_SIZE), other=0.0, cache_modifier=CACHE)
    return merged(highest, total, sums, split_highest, split_total, split)


@triton.jit
def with_sinks(
    highest: tl.tensor, total: tl.tensor, sums: tl.tensor, sinks: tl.tensor, is_head: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the highest score [G], sum of weights [G] and weighted values [G, E] of query rows after adding their
    sinks, given by pointers [G]. FMAs are explicit, as in ``merged``.
    """
    sink = tl.load(sinks, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
    higher = tl.maximum(highest, sink)
    shrink = tl.exp2(highest - higher)
    return higher, tl.fma(total, shrink, tl.exp2(sink - higher)), sums * shrink[:, None]


@triton.jit
def store_attended(
    out: tl.tensor,
    targets: tl.tensor,
    is_head: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    sums: tl.tensor,
    sinks: tl.tensor,
    heads: tl.tensor,
    VALUE_SIZE: tl.constexpr,
) -> None:
    """Store the attention result of query rows at indices ``targets`` [G] of ``out``, after adding the sinks of their
    heads [G] if there are any.
    """
    if sinks is not None:
        highest, total, sums = with_sinks(highest, total, sums, sinks + heads, is_head)
    columns = tl.arange(0, sums.shape[1])[None, :]
    inside = is_head[:, None] & (columns < VALUE_SIZE)
    places = targets[:, None] * VALUE_SIZE + columns
    tl.store(out + places, (sums / total[:, None]).to(out.dtype.element_ty), mask=inside)
