"""Routing of tokens to experts: logits [T, E] -> the experts of each token [T, K] and their weights [T, K].

The scores are computed in fp32. Of experts with equal scores, the one with the lower number is chosen, so that a
token's experts do not depend on the device. T tokens, E experts, K experts of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aioengine.kernels.expert_types import Chosen
from aioengine.kernels.sigmoid import sigmoid
from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.kernels.expert_types import Routing

_SMALLEST = 1e-20
"""Added to the sum that weights are divided by, so that scores of 0 alone give weights of 0."""


def reference(logits: Tensor, bias: Tensor | None, routing: Routing) -> Chosen:
    """As ``route``: logits [T, E] and bias [E] -> [T, K]."""
    wide = logits.float()
    scores = wide.softmax(-1) if routing.scoring == "softmax" else sigmoid(wide)
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
    return Chosen(experts.int(), weights * routing.scale)


def _best(scores: Tensor, count: int) -> Tensor:
    """scores [T, N] -> the indices [T, count] of the largest; of equal ones, the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> Chosen:
    """logits [T, E] -> the experts of each token.

    ``bias`` [E] is added to the scores to choose experts, and not to weight them; None: nothing is added.
    """
    if not launcher.serves(logits):
        return reference(logits, bias, routing)
    from aioengine.kernels.triton.routing import route as route_on_device

    return route_on_device(logits, bias, routing)
