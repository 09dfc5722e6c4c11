"""Post-norm residual: add RMSNorm of a layer's output to the residual stream, then return RMSNorm of the sum.

Tensors are [T, D]. Both norms use the same epsilon. The residual is changed in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.kernels.rms_norm import rms_norm
from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor


def reference(delta: Tensor, residual: Tensor, post: Tensor, pre: Tensor | None, *, epsilon: Tensor) -> Tensor:
    """Add the norm of delta to the residual, [T, D] each, and return the norm of the sum [T, D].

    post: weight [D] of the norm after this layer. pre: weight [D] of the norm before the next layer; None: the sum
    itself is returned.
    """
    residual.add_(rms_norm(delta, post, epsilon))
    return residual if pre is None else rms_norm(residual, pre, epsilon)


def norm_and_add(delta: Tensor, residual: Tensor, post: Tensor, pre: Tensor | None, *, epsilon: Tensor) -> Tensor:
    """Compute ``reference``: contiguous [T, D] -> [T, D]."""
    if not launcher.serves(residual):
        return reference(delta, residual, post, pre, epsilon=epsilon)
    from aioengine.kernels.triton import rows

    return rows.norm_and_add(delta, residual, post, pre, epsilon=epsilon)
