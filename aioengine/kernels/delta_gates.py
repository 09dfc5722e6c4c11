"""Gates of the gated delta rule: the decay of the state and the update strength. T tokens, H heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

_LINEAR_FROM: Final = 20.0
"""For larger x, softplus(x) is computed as x."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaGates:
    """The decay g = -exp(log_rate) * softplus(steps + bias), and beta = sigmoid(scores).

    Attributes:
        steps, scores: [T, H], any row stride, the same for both.
        log_rate, bias: [H] fp32.
    """

    steps: Tensor
    scores: Tensor
    log_rate: Tensor
    bias: Tensor

    def values(self) -> tuple[Tensor, Tensor]:
        """Return exp(g) [T, H] and beta [T, H], in fp32."""
        steps = self.steps.float() + self.bias
        # exp and log1p, because torch's softplus and sigmoid are not batch-invariant (see silu_and_mul)
        positive = torch.where(steps > _LINEAR_FROM, steps, steps.exp().log1p_())
        decays = positive.mul_(self.log_rate.exp()).neg_().exp_()
        betas = torch.neg(self.scores.float()).exp_().add_(1.0).reciprocal_()
        return decays, betas.to(self.scores.dtype).float()
