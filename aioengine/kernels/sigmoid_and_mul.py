"""sigmoid(gates) * x, [T, I] each -> [T, I]."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def sigmoid_and_mul(gates: Tensor, x: Tensor) -> Tensor:
    """Return sigmoid(gates) * x: [T, I] each -> [T, I].

    In fp32 on a CPU it avoids torch's sigmoid, which is not batch-invariant: see ``silu_and_mul``.
    """
    if gates.dtype == torch.float32 and gates.device.type == "cpu":
        return torch.div(x, torch.neg(gates).exp_().add_(1.0))
    return torch.sigmoid(gates).mul_(x)
