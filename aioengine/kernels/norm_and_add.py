"""The norm of a layer's output is added to a residual stream, which is normed in turn: two tensors [T, D] -> [T, D].

Both are ``rms_norm`` with one epsilon. The residual is changed in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.kernels.rms_norm import rms_norm
from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor


def reference(delta: Tensor, residual: Tensor, behind: Tensor, before: Tensor | None, *, epsilon: Tensor) -> Tensor:
    """delta and residual [T, D], weights [D] of the norm behind the layer and of that before the next one -> [T, D].

    Without the latter, it returns the residual.
    """
    residual.add_(rms_norm(delta, behind, epsilon))
    return residual if before is None else rms_norm(residual, before, epsilon)


def norm_and_add(delta: Tensor, residual: Tensor, behind: Tensor, before: Tensor | None, *, epsilon: Tensor) -> Tensor:
    """As ``reference``: [T, D], both contiguous -> [T, D]."""
    if not launcher.serves(residual):
        return reference(delta, residual, behind, before, epsilon=epsilon)
    from aioengine.kernels.triton import rows

    return rows.norm_and_add(delta, residual, behind, before, epsilon=epsilon)
