"""Routing of tokens to experts: logits [T, E] -> the experts [T, K] int32 of each token and their weights [T, K] fp32.

The scores are computed in fp32. Of experts with equal scores, the one with the lower number is chosen, so that a
token's experts do not depend on the device. T tokens, E experts, K experts of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor

_SMALLEST = 1e-20
"""Added to the sum that weights are divided by, so that scores of 0 alone give weights of 0."""


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


def reference(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """As ``route``."""
    wide = logits.float()
    scores = wide.softmax(-1) if routing.scoring == "softmax" else wide.sigmoid()
    chosen_by = scores if bias is None else scores + bias.float()
    if routing.num_groups > 1:
        grouped = chosen_by.unflatten(-1, (routing.num_groups, -1))
        sums = grouped.topk(routing.group_top).values.sum(-1)
        best = _best(sums, routing.top_groups)
        is_kept = torch.zeros_like(sums, dtype=torch.bool).scatter_(-1, best, value=True)
        chosen_by = grouped.masked_fill(~is_kept.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = _best(chosen_by, routing.top_k)
    weights = scores.gather(-1, experts)
    if routing.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST)
    return experts.int(), weights * routing.scale


def _best(scores: Tensor, count: int) -> Tensor:
    """scores [T, N] -> the indices [T, count] of the largest; of equal ones, the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> experts [T, K] int32 and weights [T, K] fp32, the best first.

    ``bias`` [E] is added to the scores to choose experts, and not to weight them; None: nothing is added.
    """
    if not launcher.serves(logits):
        return reference(logits, bias, routing)
    from aioengine.kernels.triton.routing import route as route_on_device

    return route_on_device(logits, bias, routing)
