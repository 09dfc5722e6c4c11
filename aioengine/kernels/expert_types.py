"""Types of the mixture-of-experts kernels.

T tokens, D model size, I inner size, E experts, K experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


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
    """The weights of all experts: gate_up [E, 2 I, D], gates first; down [E, D, I]; biases [E, 2 I] and [E, D]."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate: GateFunction = SILU


class SharedOutputs(NamedTuple):
    """Outputs of the shared experts, which process all tokens.

    Attributes:
        values: [T, D].
        gates: [T, 1]; the values are multiplied by the sigmoid of these logits. None: no factor.
    """

    values: Tensor
    gates: Tensor | None = None
