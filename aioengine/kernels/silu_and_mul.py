"""Gated activation: x [T, 2 I], gate columns first -> silu(gate) * up [T, I]."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor


def reference(x: Tensor) -> Tensor:
    """x [T, 2 I] -> [T, I]."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2 I] -> [T, I].

    In fp32 on a CPU, torch's silu is not batch-invariant: it rounds the last few elements of each thread's range
    differently from the others. Its exp does not. In bf16 all 65,536 inputs agree.
    """
    if launcher.serves(x):
        from aioengine.kernels.triton import rows

        return rows.silu_and_mul(x)
    gate, up = x.chunk(2, dim=-1)
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return torch.div(gate, torch.neg(gate).exp_().add_(1.0)).mul_(up)
    return functional.silu(gate).mul_(up)
