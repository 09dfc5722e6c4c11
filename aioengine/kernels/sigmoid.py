"""Sigmoid: x [...] -> [...]."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def reference(x: Tensor) -> Tensor:
    """Return torch.sigmoid of x [...]."""
    return torch.sigmoid(x)


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of x [...].

    On a CPU torch's sigmoid is not batch-invariant (see ``silu_and_mul``), but its exp is.
    """
    if x.device.type != "cpu":
        return torch.sigmoid(x)
    return torch.neg(x.float()).exp_().add_(1.0).reciprocal_().to(x.dtype)
