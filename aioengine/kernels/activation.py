"""Activations: x [...] -> [...], and for gated MLPs: x [T, 2 F], gates first -> activation(gates) * ups [T, F].

On a CPU they are batch-invariant. torch's own silu, sigmoid, softplus and tanh-approximated GELU are not: in fp32 they
round the last few elements of each thread's range differently from the others. torch's exp and log1p do not, so we
compute the activations from these. In bf16, torch's silu gives equal results for all 65,536 inputs.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from aioengine.families._block_config import Activation
from aioengine.kernels import linear
from aioengine.kernels.triton import launcher

CACHED_ROWS = 64
"""Rows per piece of the tanh-approximated GELU on a CPU. Temporary tensors of this size fit the cache."""
_APPROXIMATE: Final = {"gelu": "none", "gelu_tanh": "tanh"}
_LINEAR_FROM: Final = 20.0
"""For larger x, softplus(x) is computed as x."""


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of x [...]."""
    if x.device.type != "cpu":
        return torch.sigmoid(x)
    return torch.neg(x.float()).exp_().add_(1.0).reciprocal_().to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """Return softplus of x [...] in fp32."""
    return torch.where(x > _LINEAR_FROM, x, x.exp().log1p_())


def silu(x: Tensor) -> Tensor:
    """Return silu of x [...]."""
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return torch.div(x, torch.neg(x).exp_().add_(1.0))
    return functional.silu(x)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """Return the GELU of x [...]. approximate: "none" or "tanh", as in torch.

    On a CPU, torch calls oneDNN for the exact GELU of contiguous tensors in the dtypes of ``linear.uses_onednn``. It is
    batch-invariant. On a GPU, the exact GELU in 16 bits is our own kernel, with an error below 4e-7 before rounding.
    """
    if x.dtype != torch.float32 and approximate == "none" and launcher.supports(x) and x.is_contiguous():
        from aioengine.kernels.triton import activation as kernels

        return kernels.gelu(x)
    if x.device.type != "cpu":
        return functional.gelu(x, approximate=approximate)
    if approximate == "none":
        supported = x if linear.uses_onednn(x.dtype, x.device) else x.float()
        return functional.gelu(supported.contiguous()).to(x.dtype)
    if x.ndim == 2 and len(x) > CACHED_ROWS:
        return torch.cat([_gelu_tanh(rows) for rows in x.split(CACHED_ROWS)])
    return _gelu_tanh(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation for x [...] on a CPU."""
    wide = x.float()
    inner = wide.square().mul_(0.044715).add_(1.0).mul_(wide).mul_(math.sqrt(2 / math.pi))
    return inner.tanh_().add_(1.0).mul_(0.5).mul_(wide).to(x.dtype)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Return the activation of x [...]. The result may reuse the memory of x."""
    if activation == "relu":
        return x.relu_()
    return silu(x) if activation == "silu" else gelu(x, approximate=_APPROXIMATE[activation])


def activate_and_mul(x: Tensor, activation: Activation) -> Tensor:
    """x [T, 2 F], gates first -> activation(gates) * ups [T, F]."""
    if launcher.supports(x) and activation != "relu":
        from aioengine.kernels.triton import activation as kernels

        return kernels.activate_and_mul(x, activation)
    gates, ups = x.chunk(2, dim=-1)
    return activate(gates, activation).mul_(ups)


def sigmoid_and_mul(gates: Tensor, x: Tensor) -> Tensor:
    """Return sigmoid(gates) * x: [T, F] each -> [T, F]."""
    if gates.dtype == torch.float32 and gates.device.type == "cpu":
        return torch.div(x, torch.neg(gates).exp_().add_(1.0))
    return torch.sigmoid(gates).mul_(x)
