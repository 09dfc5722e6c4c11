"""The weights of a Mamba 2 layer, read by the operation and by its kernels. H heads.

The time step is dt = softplus(step + bias). The state decays by exp(-exp(log_rate) dt). skip * x is added to the
output.
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
        log_rate: [H] fp32, logarithm of the decay rate.
        bias: [H] fp32, bias of the time steps.
        skip: [H] fp32, factor of the skip connection.
        limits: minimum and maximum time step.
    """

    log_rate: Tensor
    bias: Tensor
    skip: Tensor
    limits: tuple[float, float]
