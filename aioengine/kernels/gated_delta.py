"""The gated delta rule (Gated Delta Networks, arXiv 2412.06464): linear attention with one state matrix S per head.

For each token, in fp32, with q and k normalized to length 1, and q scaled by ``K ** -0.5``:

    S = exp(g) S;   S = S + k (beta (v - S^T k))^T;   output = S^T q

T packed tokens, H value heads, G key heads (H / G value heads share one), K key size, V value size, C = 2 G K + H V
channels, N slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.activation import sigmoid, softplus
from aioengine.kernels.state_types import DeltaGates, StateRows
from aioengine.kernels.triton import launcher

EPSILON = 1e-6  # of the norm of q and k


def gated_delta(
    channels: Tensor, gates: DeltaGates, state: Tensor, rows: StateRows, *, in_blocks: bool = False
) -> Tensor:
    """Compute the output of each head, and update the state.

    On a CPU, it computes token after token with operations on tensors of the same shape, so that the result of a token
    depends neither on the chunk that contains it nor on other rows.

    Args:
        channels: [T, C], q of all key heads, then k, then v of all value heads.
        state: [N, H, K, V] fp32, changed in place.
        in_blocks: on a GPU, long rows may be computed in blocks of tokens with tf32 products. The result of a token
            then depends on the chunks of its prompt.

    Returns:
        [T, H, V] in the dtype of ``channels``.
    """
    if launcher.supports(channels):
        from aioengine.kernels.triton import gated_delta as kernels

        return kernels.gated_delta(channels, gates, state, rows, in_blocks=in_blocks)
    num_heads, key_size, value_size = state.shape[1:]
    num_key_heads = (channels.shape[1] - num_heads * value_size) // (2 * key_size)
    keys_size = num_key_heads * key_size
    wide = channels.float()
    q, k = (
        _unit(part.unflatten(1, (num_key_heads, key_size))).repeat_interleave(num_heads // num_key_heads, dim=1)
        for part in (wide[:, :keys_size], wide[:, keys_size : 2 * keys_size])
    )
    q = (q * key_size**-0.5).unsqueeze(-1)
    k = k.unsqueeze(-1)
    v = wide[:, 2 * keys_size :].unflatten(1, (num_heads, value_size))
    steps = softplus(gates.steps.float() + gates.bias)
    decays = steps.mul_(gates.log_rate.exp()).neg_().exp_()[:, :, None, None]
    betas = sigmoid(gates.scores).float().unsqueeze(-1)
    out = torch.zeros(v.shape, dtype=channels.dtype, device=channels.device)
    products = torch.empty_like(state[0])
    for slot, start, first, end in rows.on_host():
        matrix = state[slot]
        if not start:
            matrix.zero_()
        for token in range(first, end):
            matrix.mul_(decays[token])
            recalled = torch.mul(matrix, k[token], out=products).sum(1)
            change = (v[token] - recalled).mul_(betas[token])
            matrix.addcmul_(k[token], change.unsqueeze(1))
            out[token] = torch.mul(matrix, q[token], out=products).sum(1)
    return out


def _unit(x: Tensor) -> Tensor:
    """Normalize x [..., K] to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)
