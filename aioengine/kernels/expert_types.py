"""Types of the mixture-of-experts kernels.

T tokens, D hidden size, F inner size, E experts, K experts per token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from aioengine.kernels.codes import Codes


class ChosenExperts(NamedTuple):
    """The experts of each token, best first.

    Attributes:
        experts: [T, K] int32.
        weights: [T, K] fp32.
    """

    experts: Tensor
    weights: Tensor


class GateFunction(NamedTuple):
    """The activation of gated MLPs.

    Attributes:
        limit: 0: silu(gate) * up. Else (up + 1) * gate * sigmoid(alpha * gate), where gate is clamped to at most
            ``limit``, and up to -``limit`` ... ``limit``.
        alpha: see ``limit``.
    """

    limit: float = 0.0
    alpha: float = 1.0


SILU = GateFunction()


class ExpertWeights(NamedTuple):
    """The weights of all experts.

    Attributes:
        gate_up: [E, 2 F, D], gates first; or codes [E * 2 F, D].
        down: [E, D, F]; or codes [E * D, F].
        gate_up_bias: [E, 2 F].
        down_bias: [E, D].
    """

    gate_up: Tensor | Codes
    down: Tensor | Codes
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate: GateFunction = SILU

    @property
    def num_experts(self) -> int:
        """E."""
        return math.prod(self.gate_up.shape[:-1]) // (2 * self.down.shape[-1])


class SharedOutputs(NamedTuple):
    """Outputs of the shared experts, which process all tokens.

    Attributes:
        values: [T, D].
        gates: [T, 1]; the values are multiplied by the sigmoid of these logits. None: no factor.
    """

    values: Tensor
    gates: Tensor | None = None
