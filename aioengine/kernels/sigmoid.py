"""Sigmoid: x [...] -> [...]."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def reference(x: Tensor) -> Tensor:
    """x [...] -> [...]."""
    return torch.sigmoid(x)


def sigmoid(x: Tensor) -> Tensor:
    """As ``reference``: [...] -> [...].

    On a CPU without torch's own, which rounds the last few elements of a range differently from the others, so that a
    token's bits would depend on the batch; its exp does not.
    """
    if x.device.type != "cpu":
        return torch.sigmoid(x)
    return torch.neg(x.float()).exp_().add_(1.0).reciprocal_().to(x.dtype)
