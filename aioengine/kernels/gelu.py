"""GELU: x [...] -> [...], exact, or approximated by tanh."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from aioengine.kernels import linear
from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor

CACHED_ROWS = 64
"""Rows of the approximation that a CPU computes together: few enough for its numbers to stay in the cache."""


def reference(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x [...] -> [...]. ``approximate``: "none" or "tanh", as torch has it."""
    return functional.gelu(x, approximate=approximate)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """As ``reference``: [...] -> [...].

    On a CPU torch's own kernels round the last few elements of a range differently from the others, so that a token's
    bits would depend on the batch. oneDNN, which torch calls for contiguous numbers of the exact one, does not. In 16
    bits on a GPU the exact one is a kernel of our own, whose error before the rounding is below 4e-7.
    """
    if x.dtype != torch.float32 and approximate == "none" and launcher.serves(x) and x.is_contiguous():
        from aioengine.kernels.triton import rows

        return rows.gelu(x)
    if x.device.type != "cpu":
        return functional.gelu(x, approximate=approximate)
    if approximate == "none":
        known = x if linear.packs(x.dtype, x.device) else x.float()
        return functional.gelu(known.contiguous()).to(x.dtype)
    if x.ndim == 2 and len(x) > CACHED_ROWS:
        return torch.cat([_approximated(rows) for rows in x.split(CACHED_ROWS)])
    return _approximated(x)


def _approximated(x: Tensor) -> Tensor:
    """x [...] -> [...], by operations of torch whose bits do not depend on the place of an element."""
    wide = x.float()
    inner = wide.square().mul_(0.044715).add_(1.0).mul_(wide).mul_(math.sqrt(2 / math.pi))
    return inner.tanh_().add_(1.0).mul_(0.5).mul_(wide).to(x.dtype)
