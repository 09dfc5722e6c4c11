"""Norms. T tokens, D model size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from aioengine.kernels.add_layer_norm import add_layer_norm
from aioengine.kernels.add_rms_norm import add_rms_norm
from aioengine.kernels.rms_norm import rms_norm
from aioengine.layers.placement import Target

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.layers.placement import Placement


class RMSNorm:
    """[..., D] -> [..., D]."""

    def __init__(self, size: int, epsilon: float, placement: Placement) -> None:
        self.weight = placement.empty(size)
        self.epsilon = torch.tensor(epsilon, dtype=torch.float32, device=placement.device)

    def weights(self, name: str) -> dict[str, Target]:
        return {f"{name}.weight": Target(self.weight)}

    def __call__(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return rms_norm(x, self.weight, self.epsilon)

    def after(self, delta: Tensor, residual: Tensor) -> Tensor:
        """Add ``delta`` [T, D] to ``residual`` [T, D] in place; return the norm of the sum, [T, D]."""
        return add_rms_norm(delta, residual, self.weight, self.epsilon)


class LayerNorm:
    """[..., D] -> [..., D], with the mean taken away."""

    def __init__(self, size: int, epsilon: float, placement: Placement, *, bias: bool) -> None:
        self._weight = placement.empty(size)
        self._bias = placement.empty(size) if bias else None
        self._epsilon = epsilon

    def weights(self, name: str) -> dict[str, Target]:
        found = {f"{name}.weight": Target(self._weight)}
        return found if self._bias is None else {**found, f"{name}.bias": Target(self._bias)}

    def __call__(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return functional.layer_norm(x, self._weight.shape, self._weight, self._bias, self._epsilon)

    def after(self, delta: Tensor, residual: Tensor, *, keeps_sum: bool) -> Tensor:
        """The norm of ``delta`` + ``residual``, [T, D] each -> [T, D]; ``keeps_sum``: ``residual`` becomes the sum."""
        return add_layer_norm(
            delta, residual, weight=self._weight, bias=self._bias, epsilon=self._epsilon, keeps_sum=keeps_sum
        )
