"""RMSNorm of each head, multiplied by SiLU of its gates. T tokens, H heads, V head size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aioengine.kernels.rms_norm import reference as rms_norm
from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor


def reference(heads: Tensor, gates: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """Compute ``gated_rms_norm`` in torch: heads [T, H, V], gates [T, H * V], weight [V] -> [T, H * V]."""
    wide = gates.float()
    active = torch.div(wide, torch.neg(wide).exp_().add_(1.0))
    return rms_norm(heads, weight, epsilon).float().flatten(1).mul_(active).to(heads.dtype)


def gated_rms_norm(heads: Tensor, gates: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """Return the norm of each head, multiplied by SiLU of its gates. SiLU is computed in fp32.

    Args:
        heads: [T, H, V].
        gates: [T, H * V], any row stride.
        weight: [V].
        epsilon: [] fp32.

    Returns:
        [T, H * V] in the dtype of ``heads``.
    """
    if launcher.serves(heads):
        from aioengine.kernels.triton import gated_delta as kernels

        return kernels.gated_rms_norm(heads, gates, weight, epsilon)
    return reference(heads, gates, weight, epsilon)
