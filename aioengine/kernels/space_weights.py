"""The weights of a state space: how fast it fades, its time steps, and what passes it by. H heads.

Beside the operation, since its kernels read them too: time steps are dt = softplus(step + bias), the state fades by
exp(-exp(log_rate) dt), and skip times its input is added to the output of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceWeights:
    """The weights of a layer.

    Attributes:
        log_rate: [H] fp32, the logarithm of the rate at which the matrix of a head fades.
        bias: [H] fp32, of the time steps.
        skip: [H] fp32, the factor of what passes the state by.
        limits: the least and the most of a time step.
    """

    log_rate: Tensor
    bias: Tensor
    skip: Tensor
    limits: tuple[float, float]
