"""Routing of tokens to experts: logits [T, E] -> experts [T, K] and weights [T, K].

Scores are computed in fp32. Ties go to the expert with the lower index, so the result does not depend on the device.
T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.families._experts import RouterConfig
from aioengine.kernels.activation import sigmoid
from aioengine.kernels.expert_types import ChosenExperts
from aioengine.kernels.triton import launcher

_SMALLEST = 1e-20
"""Added to the sum in the normalization of weights, to avoid a division by 0."""


def route(logits: Tensor, bias: Tensor | None, top_k: int, router: RouterConfig) -> ChosenExperts:
    """Choose the experts of each token from logits [T, E].

    top_k: K. bias: [E], added to the scores for the choice of experts but not for their weights; None: no bias.
    """
    if launcher.supports(logits):
        from aioengine.kernels.triton.routing import route as route_on_device

        return route_on_device(logits, bias, top_k, router)
    wide = logits.float()
    scores = wide.softmax(-1) if router.scoring == "softmax" else sigmoid(wide)
    chosen_by = scores if bias is None else scores + bias.float()
    if router.num_groups > 1:
        grouped = chosen_by.unflatten(-1, (router.num_groups, -1))
        sums = grouped.topk(router.group_top).values.sum(-1)
        best = _best(sums, router.top_groups)
        is_kept = torch.zeros_like(sums, dtype=torch.bool).scatter_(-1, best, value=True)
        chosen_by = grouped.masked_fill(~is_kept.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = _best(chosen_by, top_k)
    weights = scores.gather(-1, experts)
    if router.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST)
    return ChosenExperts(experts.int(), weights * router.scale)


def _best(scores: Tensor, count: int) -> Tensor:
    """Return the indices [T, count] of the largest scores [T, N]. Ties go to the lower index."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
