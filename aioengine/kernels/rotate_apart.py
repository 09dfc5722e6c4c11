"""Queries and keys of two tensors are rotated, half against half: q [1, H, T, E], k [1, K, T, E] -> the same shapes.

As transformers' functions compute it: each product is rounded, and then their sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [1, H, T, E], k [1, K, T, E], cos and sin [1, T, E] -> q and k."""
    return _turned(q, cos[:, None], sin[:, None]), _turned(k, cos[:, None], sin[:, None])


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [1, H, T, E], cos and sin [1, 1, T, E] -> [1, H, T, E]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def takes(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether ``rotate_apart`` has a kernel for q [1, H, T, E], k [1, K, T, E], cos and sin [1, T, E]."""
    shape = (1, q.shape[2], q.shape[3])
    are_alike = q.dtype == k.dtype == cos.dtype == sin.dtype and cos.shape == sin.shape == shape
    return launcher.serves(q) and q.dim() == 4 and are_alike and k.shape == (1, k.shape[1], *shape[1:])


def rotate_apart(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As ``reference``; in memory the heads of a token are together, [T, H, E] and [T, K, E]. For what is ``takes``."""
    if not launcher.serves(q):
        return reference(q, k, cos, sin)
    from aioengine.kernels.triton.heads import rotate_apart as rotate

    heads = [each[0].transpose(0, 1) for each in (q, k)]
    queries, keys = (each if each.stride(-1) == 1 else each.contiguous() for each in heads)
    queries, keys = rotate(queries, keys, cos[0], sin[0])
    return queries.transpose(0, 1)[None], keys.transpose(0, 1)[None]
