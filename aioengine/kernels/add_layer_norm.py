"""LayerNorm of a sum, computed in fp32: delta and residual [T, D] -> [T, D]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor


def reference(
    delta: Tensor, residual: Tensor, *, weight: Tensor, bias: Tensor | None, epsilon: float, keeps_sum: bool
) -> Tensor:
    """delta and residual [T, D], weight and bias [D] -> [T, D]. keeps_sum: store the sum in the residual."""
    total = residual.add_(delta) if keeps_sum else residual + delta
    return functional.layer_norm(total, weight.shape, weight, bias, epsilon)


def add_layer_norm(
    delta: Tensor, residual: Tensor, *, weight: Tensor, bias: Tensor | None, epsilon: float, keeps_sum: bool
) -> Tensor:
    """Return the norm of delta + residual [T, D]. keeps_sum: store the sum in the residual."""
    if not launcher.serves(residual):
        return reference(delta, residual, weight=weight, bias=bias, epsilon=epsilon, keeps_sum=keeps_sum)
    from aioengine.kernels.triton import rows

    return rows.add_layer_norm(delta, residual, weight=weight, bias=bias, epsilon=epsilon, keeps_sum=keeps_sum)
