"""Types of the mixture-of-experts kernels.

T tokens, D model size, I inner size, E experts, K experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Routing(NamedTuple):
    """How experts are chosen and weighted.

    Attributes:
        top_k: K.
        scoring: "softmax" over all experts, or "sigmoid" of each logit.
        is_normalized: divide the weights of a token by their sum.
        scale: factor of all weights.
        num_groups: number of equal groups of experts; 1: no groups.
        top_groups: number of groups from which the experts of a token are chosen.
        group_top: the score of a group is the sum of its ``group_top`` best scores.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_normalized: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_top: int = 1


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
