"""Root mean square norm over the last axis: x [..., D], weight [D] -> [..., D], computed in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def reference(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * inverse).to(x.dtype) * weight


rms_norm = reference
