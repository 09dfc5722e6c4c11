"""A residual stream takes in what a layer gave, and is normed: delta and residual [T, D], weight [D] -> [T, D].

The residual is changed in place. What it gives is ``rms_norm`` of the sum, computed in fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.kernels.rms_norm import rms_norm
from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor


def reference(delta: Tensor, residual: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """delta and residual [T, D], weight [D] -> [T, D]; the residual is changed in place."""
    return rms_norm(residual.add_(delta), weight, epsilon)


def add_rms_norm(delta: Tensor, residual: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """delta and residual [T, D], weight [D], epsilon [] fp32 -> [T, D]; the residual is changed in place."""
    if not launcher.serves(residual):
        return reference(delta, residual, weight, epsilon)
    from aioengine.kernels.triton import rows

    return rows.add_rms_norm(delta, residual, weight, epsilon)
