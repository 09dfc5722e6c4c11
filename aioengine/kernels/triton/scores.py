"""What attention kernels do beside scaled dot products: windows, capped scores, learned sinks.

Scores are in units of log2, for weights are powers of two. G query rows, H query heads, E head size.
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
    """``window``: positions that a token attends to, the last of them its own. ``soft_cap``, ``sinks``: as in
    ``AttentionShape``, sinks [H] of one layer. None: there are none.
    """

    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None

    def factor(self, scale: float) -> float:
        """What a kernel multiplies dot products with: for ``capped`` where there is a cap."""
        return scale / math.log(2) * (1.0 if self.soft_cap is None else 2.0 / self.soft_cap)

    @property
    def cap(self) -> float:
        """The constant CAP of the kernels; 0.0: no cap."""
        return 0.0 if self.soft_cap is None else self.soft_cap / math.log(2)

    @property
    def sinks_key(self) -> object:
        """What specializations differ in by the sinks."""
        return None if self.sinks is None else (self.sinks.dtype, self.sinks.data_ptr() % 16)


NO_RULES = ScoreRules()


@triton.jit
def capped(products: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """``CAP * tanh(x)`` for ``products`` of 2 x in units of log2."""
    return CAP - 2.0 * CAP / (tl.exp2(products) + 1.0)


@triton.jit
def with_sinks(
    highest: tl.tensor, total: tl.tensor, sums: tl.tensor, sinks: tl.tensor, is_head: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Highest score [G], sum of weights [G] and weighted values [G, E] of query rows, with the sink of each, of
    pointers [G], in its sum. The multiplications and additions are named one by one, as in ``attention.merged``.
    """
    sink = tl.load(sinks, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
    higher = tl.maximum(highest, sink)
    shrink = tl.exp2(highest - higher)
    return higher, tl.fma(total, shrink, tl.exp2(sink - higher)), sums * shrink[:, None]
