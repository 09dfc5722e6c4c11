"""Rotary embedding of separate q [1, H, T, E] and k [1, K, T, E], as ``apply_rotary_pos_emb`` of transformers.

Like transformers, it rounds each product, and then their sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aioengine.kernels.triton import launcher


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [1, H, T, E], cos and sin [1, 1, T, E] -> [1, H, T, E]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def takes(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether ``rotate_qk`` has a kernel for q [1, H, T, E], k [1, K, T, E], cos and sin [1, T, E]."""
    shape = (1, q.shape[2], q.shape[3])
    are_alike = q.dtype == k.dtype == cos.dtype == sin.dtype and cos.shape == sin.shape == shape
    return launcher.serves(q) and q.dim() == 4 and are_alike and k.shape == (1, k.shape[1], *shape[1:])


def rotate_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [1, H, T, E] and k [1, K, T, E] by cos and sin [1, T, E]. On a GPU ``takes`` must be true.

    In memory, the results on a GPU are [T, H, E] and [T, K, E].
    """
    if not launcher.serves(q):
        return _rotated(q, cos[:, None], sin[:, None]), _rotated(k, cos[:, None], sin[:, None])
    from aioengine.kernels.triton import heads

    tokens_first = [x[0].transpose(0, 1) for x in (q, k)]
    queries, keys = (x if x.stride(-1) == 1 else x.contiguous() for x in tokens_first)
    queries, keys = heads.rotate_qk(queries, keys, cos[0], sin[0])
    return queries.transpose(0, 1)[None], keys.transpose(0, 1)[None]
