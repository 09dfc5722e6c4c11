"""GELU: x [...] -> [...], exact, or approximated by tanh."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor


def reference(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x [...] -> [...]. ``approximate``: "none" or "tanh", as torch has it."""
    return functional.gelu(x, approximate=approximate)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """As ``reference``: [...] -> [...].

    In fp32 on a CPU torch's own kernels round the last few elements of a range differently from the others, so that a
    token's bits would depend on the batch. Contiguous numbers go through oneDNN, which does not, but for the
    approximation. In 16 bits on a GPU the exact one is a kernel of our own, whose error before
    the rounding is below 4e-7.
    """
    if x.dtype != torch.float32 and approximate == "none" and launcher.serves(x) and x.is_contiguous():
        from aioengine.kernels.triton import rows

        return rows.gelu(x)
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return functional.gelu(x, approximate=approximate)
    if approximate == "none":
        return functional.gelu(x.contiguous())
    inner = x.square().mul_(0.044715).add_(1.0).mul_(x).mul_(math.sqrt(2 / math.pi))
    return inner.tanh_().add_(1.0).mul_(x).mul_(0.5)
