"""Add a layer's output to the residual stream and return RMSNorm of the sum: delta, residual [T, D] -> [T, D].

The residual is changed in place. The norm is computed in fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.kernels.rms_norm import rms_norm
from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor


def reference(delta: Tensor, residual: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """Compute ``add_rms_norm`` in torch: delta and residual [T, D], weight [D] -> [T, D]."""
    return rms_norm(residual.add_(delta), weight, epsilon)


def add_rms_norm(delta: Tensor, residual: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """Return the norm of delta + residual [T, D], and store the sum in the residual. weight [D], epsilon [] fp32."""
    if not launcher.serves(residual):
        return reference(delta, residual, weight, epsilon)
    from aioengine.kernels.triton import rows

    return rows.add_rms_norm(delta, residual, weight, epsilon)
