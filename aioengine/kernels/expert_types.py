"""What the kernels of mixtures of experts are given.

T tokens, D model size, I inner size, E experts, K experts of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Routing(NamedTuple):
    """How experts are chosen and weighted.

    Attributes:
        top_k: K.
        scoring: the function that makes scores of logits: over all experts, or for each on its own.
        is_normalized: whether the weights of a token are divided by their sum.
        scale: a factor of all weights.
        num_groups: groups of equal size that experts are divided into; 1: no groups.
        top_groups: the groups from which a token's experts are chosen.
        group_top: the best experts of a group whose scores, added up, are the score of the group.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    is_normalized: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_top: int = 1


class Chosen(NamedTuple):
    """The experts of tokens, the best first.

    Attributes:
        experts: [T, K] int32.
        weights: [T, K] fp32.
    """

    experts: Tensor
    weights: Tensor


class Gate(NamedTuple):
    """The function of gates and the values that they gate.

    Attributes:
        limit: 0: silu(gate) * up. Else (up + 1) * gate * sigmoid(alpha * gate), of a gate of at most ``limit`` and an
            up between -``limit`` and ``limit``.
        alpha: as above.
    """

    limit: float = 0.0
    alpha: float = 1.0


SILU = Gate()


class ExpertWeights(NamedTuple):
    """Attributes: gate_up [E, 2 I, D], gates first; down [E, D, I]; their biases [E, 2 I] and [E, D], if there are."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate: Gate = SILU


class Shared(NamedTuple):
    """Results of experts that all tokens share.

    Attributes:
        values: [T, D].
        gates: [T, 1], logits of a factor of each token; None: no factor.
    """

    values: Tensor
    gates: Tensor | None = None
