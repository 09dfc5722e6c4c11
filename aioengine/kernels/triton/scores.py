"""Optional features of attention scores: sliding windows, soft caps, learned sinks.

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
def with_sinks(
    highest: tl.tensor, total: tl.tensor, sums: tl.tensor, sinks: tl.tensor, is_head: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the highest score [G], sum of weights [G] and weighted values [G, E] of query rows after adding their
    sinks, given by pointers [G]. FMAs are explicit, as in ``attention.merged``.
    """
    sink = tl.load(sinks, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
    higher = tl.maximum(highest, sink)
    shrink = tl.exp2(highest - higher)
    return higher, tl.fma(total, shrink, tl.exp2(sink - higher)), sums * shrink[:, None]
