"""Norms over the last axis, computed in fp32, and their sums with the residual stream. T tokens, D hidden size."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from aioengine.kernels.activation import silu
from aioengine.kernels.triton import launcher


def rms_norm(x: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """Return the root mean square norm: x [..., D], weight [D], epsilon [] fp32 on the device of x -> [..., D].

    An fp32 weight is multiplied in fp32, and the result is rounded once. The sum of squares is computed as the squared
    length, because this takes fewer operations: with one token on a CPU, the call overhead dominates.
    """
    if x.ndim == 2 and launcher.supports(x):
        from aioengine.kernels.triton import norms as kernels

        return kernels.add_rms_norm(None, x, weight, epsilon)
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = torch.addcmul(epsilon, length, length, value=1.0 / x.shape[-1]).rsqrt_()
    scaled = wide * inverse if x.dtype == torch.float32 else wide.mul_(inverse)
    if weight.dtype == torch.float32:
        return scaled.mul_(weight).to(x.dtype)
    return scaled.to(x.dtype).mul_(weight)


def add_rms_norm(delta: Tensor, residual: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """Return the norm of delta + residual [T, D], and store the sum in the residual. weight [D], epsilon [] fp32."""
    if not launcher.supports(residual):
        return rms_norm(residual.add_(delta), weight, epsilon)
    from aioengine.kernels.triton import norms as kernels

    return kernels.add_rms_norm(delta, residual, weight, epsilon)


def norm_and_add(delta: Tensor, residual: Tensor, post: Tensor, pre: Tensor | None, *, epsilon: Tensor) -> Tensor:
    """Add the norm of delta to the residual in place, contiguous [T, D] each, and return the norm of the sum [T, D].

    Args:
        post: weight [D] of the norm after this layer.
        pre: weight [D] of the norm before the next layer; None: the sum itself is returned.
        epsilon: [] fp32, of both norms.
    """
    if not launcher.supports(residual):
        residual.add_(rms_norm(delta, post, epsilon))
        return residual if pre is None else rms_norm(residual, pre, epsilon)
    from aioengine.kernels.triton import norms as kernels

    return kernels.add_rms_norm(delta, residual, pre, epsilon, post=post)


def add_layer_norm(
    delta: Tensor, residual: Tensor, *, weight: Tensor, bias: Tensor | None, epsilon: float, keeps_sum: bool
) -> Tensor:
    """Return LayerNorm of delta + residual [T, D]. keeps_sum: store the sum in the residual."""
    if not launcher.supports(residual):
        total = residual.add_(delta) if keeps_sum else residual + delta
        return functional.layer_norm(total, weight.shape, weight, bias, epsilon)
    from aioengine.kernels.triton import norms as kernels

    return kernels.add_layer_norm(delta, residual, weight=weight, bias=bias, epsilon=epsilon, keeps_sum=keeps_sum)


def gated_rms_norm(heads: Tensor, gates: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """Return the norm of each head, multiplied by silu of its gates in fp32.

    Args:
        heads: [T, H, V].
        gates: [T, H * V], any row stride.
        weight: [V].
        epsilon: [] fp32.

    Returns:
        [T, H * V] in the dtype of ``heads``.
    """
    if launcher.supports(heads):
        from aioengine.kernels.triton import gated_delta as kernels

        return kernels.gated_rms_norm(heads, gates, weight, epsilon)
    return rms_norm(heads, weight, epsilon).float().flatten(1).mul_(silu(gates.float())).to(heads.dtype)
