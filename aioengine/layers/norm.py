"""Norms. T tokens, D model size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aioengine.kernels.rms_norm import rms_norm

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.layers.placement import Placement


class RMSNorm:
    """[..., D] -> [..., D]."""

    def __init__(self, size: int, epsilon: float, placement: Placement) -> None:
        self._weight = placement.empty(size)
        self._epsilon = torch.tensor(epsilon, dtype=torch.float32, device=placement.device)

    def weights(self, name: str) -> dict[str, Tensor]:
        return {f"{name}.weight": self._weight}

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self._weight, self._epsilon)
