"""Activations by name: x [...] -> [...], and for a gated MLP: x [T, 2 I] -> activation(gates) * ups [T, I].

On a CPU they are batch-invariant, like ``gelu`` and ``silu_and_mul``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional

from aioengine.kernels.gelu import gelu
from aioengine.kernels.silu_and_mul import silu_and_mul
from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.families._block_config import Activation

_APPROXIMATE: Final = {"gelu": "none", "gelu_tanh": "tanh"}


def reference(x: Tensor, activation: Activation) -> Tensor:
    """Return the activation of x [...] as transformers computes it."""
    match activation:
        case "silu":
            return functional.silu(x)
        case "relu":
            return functional.relu(x)
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Return the activation of x [...]. The result may reuse the memory of x."""
    match activation:
        case "silu" if x.dtype == torch.float32 and x.device.type == "cpu":
            return torch.div(x, torch.neg(x).exp_().add_(1.0))
        case "silu":
            return functional.silu(x)
        case "relu":
            return x.relu_()
        case "gelu":
            return gelu(x)
        case "gelu_tanh":
            return gelu(x, approximate="tanh")


def activate_and_mul(x: Tensor, activation: Activation) -> Tensor:
    """x [T, 2 I], gates first -> activation(gates) * ups [T, I]."""
    if activation == "silu":
        return silu_and_mul(x)
    if launcher.serves(x) and activation in _APPROXIMATE:
        from aioengine.kernels.triton import rows

        return rows.gelu_and_mul(x, approximate=_APPROXIMATE[activation])
    gates, ups = x.chunk(2, dim=-1)
    return activate(gates, activation).mul_(ups)


def reference_and_mul(x: Tensor, activation: Activation) -> Tensor:
    """Compute ``activate_and_mul`` in torch: [T, 2 I] -> [T, I]."""
    gates, ups = x.chunk(2, dim=-1)
    return reference(gates, activation) * ups
