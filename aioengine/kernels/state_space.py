"""The selective state space of Mamba 2 (arXiv 2405.21060): one decaying state matrix S per head.

For each token, in fp32, with dt = softplus(step + bias) clamped to limits:

    S = exp(-exp(log_rate) dt) S + b (dt x)^T;   output = S^T c + skip x

T packed tokens, H heads, G groups (H / G heads share b and c), K and V sizes of b and x, C = H V + 2 G K channels,
N slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.activation import softplus
from aioengine.kernels.state_types import SpaceWeights, StateRows
from aioengine.kernels.triton import launcher


def state_space(
    channels: Tensor, steps: Tensor, weights: SpaceWeights, state: Tensor, *, rows: StateRows, in_blocks: bool = False
) -> Tensor:
    """Compute the output of each head, and update the state.

    Args:
        channels: [T, C], x of all heads, then b, then c of all groups.
        steps: [T, H], any row stride.
        state: [N, H, K, V] fp32, changed in place.
        in_blocks: as in ``gated_delta``.

    Returns:
        [T, H, V] in the dtype of ``channels``. It depends neither on chunks nor on other rows, unless ``in_blocks``.
    """
    if launcher.supports(channels):
        from aioengine.kernels.triton import state_space as kernels

        return kernels.state_space(channels, steps, weights, state, rows=rows, in_blocks=in_blocks)
    num_heads, key_size, value_size = state.shape[1:]
    num_groups = (channels.shape[1] - num_heads * value_size) // (2 * key_size)
    wide = channels.float()
    x, keys = wide[:, : num_heads * value_size], wide[:, num_heads * value_size :]
    x = x.unflatten(1, (num_heads, value_size))
    b, c = (
        part.unflatten(1, (num_groups, key_size)).repeat_interleave(num_heads // num_groups, dim=1).unsqueeze(-1)
        for part in keys.chunk(2, dim=1)
    )
    times = softplus(steps.float() + weights.bias).clamp_(*weights.limits)
    decays = (times * weights.log_rate.exp()).neg_().exp_()[:, :, None, None]
    inputs = (x * times.unsqueeze(-1)).unsqueeze(2)
    out = torch.zeros(x.shape, dtype=channels.dtype, device=channels.device)
    skipped = x * weights.skip.unsqueeze(-1)
    products = torch.empty_like(state[0])
    for slot, start, first, end in rows.on_host():
        matrix = state[slot]
        if not start:
            matrix.zero_()
        for token in range(first, end):
            matrix.mul_(decays[token]).addcmul_(b[token], inputs[token])
            out[token] = torch.mul(matrix, c[token], out=products).sum(1).add_(skipped[token])
    return out
