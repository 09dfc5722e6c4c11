"""Root mean square norm over the last axis: x [..., D], weight [D] -> [..., D], computed in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor


def reference(x: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """Compute x [..., D], weight [D] -> [..., D] in torch."""
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    if weight.dtype == torch.float32:
        return (wide * inverse * weight).to(x.dtype)
    return (wide * inverse).to(x.dtype) * weight


def rms_norm(x: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """x [..., D], weight [D], epsilon [] fp32 on the device of x -> [..., D].

    An fp32 weight is multiplied in fp32, and the result is rounded once. On a CPU this uses fewer operations than
    ``reference`` (the sum of squares is the squared norm), because with one token the call overhead dominates.
    """
    if x.ndim == 2 and launcher.serves(x):
        from aioengine.kernels.triton import rows

        return rows.add_rms_norm(None, x, weight, epsilon)
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = torch.addcmul(epsilon, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    if weight.dtype == torch.float32:
        return (wide * inverse).mul_(weight).to(x.dtype)
    return (wide * inverse).to(x.dtype).mul_(weight)
