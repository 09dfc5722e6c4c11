"""GELU: x [...] -> [...], exact or with the tanh approximation."""

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
"""Rows per piece of the tanh approximation on a CPU. Temporary tensors of this size fit the cache."""


def reference(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Return torch's GELU of x [...]. approximate: "none" or "tanh"."""
    return functional.gelu(x, approximate=approximate)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Return the GELU of x [...].

    On a CPU torch's own kernels are not batch-invariant (see ``silu_and_mul``). oneDNN is; torch calls it for the exact
    GELU of contiguous tensors. On a GPU, the exact GELU in 16 bits is our own kernel, with an error below 4e-7 before
    rounding.
    """
    if x.dtype != torch.float32 and approximate == "none" and launcher.serves(x) and x.is_contiguous():
        from aioengine.kernels.triton import rows

        return rows.gelu(x)
    if x.device.type != "cpu":
        return functional.gelu(x, approximate=approximate)
    if approximate == "none":
        supported = x if linear.packs(x.dtype, x.device) else x.float()
        return functional.gelu(supported.contiguous()).to(x.dtype)
    if x.ndim == 2 and len(x) > CACHED_ROWS:
        return torch.cat([_approximated(rows) for rows in x.split(CACHED_ROWS)])
    return _approximated(x)


def _approximated(x: Tensor) -> Tensor:
    """Return the tanh approximation for x [...], by operations that are batch-invariant on a CPU."""
    wide = x.float()
    inner = wide.square().mul_(0.044715).add_(1.0).mul_(wide).mul_(math.sqrt(2 / math.pi))
    return inner.tanh_().add_(1.0).mul_(0.5).mul_(wide).to(x.dtype)
