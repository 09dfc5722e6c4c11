"""``rotate_heads`` fused with the write of k and v [T, K, E] to the KV pool [N, K, S, E].

Heads are the fused QKV projection [T, H + 2 K, E]. One pass over the memory does both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aioengine.kernels.rotate_heads import as_parts
from aioengine.kernels.rotate_heads import reference as rotated
from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.kernels.rotate_heads import Heads, Norms, Tables


@dataclass(frozen=True, slots=True)
class KVTarget:
    """The destination of k and v: slots [T] (page id * S + offset) of keys and values [N, K, S, E].

    heads: contiguous [T, H + 2 K, E] that also receives q, k and v; None: no such tensor.
    """

    slots: Tensor
    keys: Tensor
    values: Tensor
    heads: Tensor | None = None


def reference(heads: Tensor, num_heads: int, tables: Tables, norms: Norms, *, target: KVTarget) -> Heads:
    """Rotate heads [T, H + 2 K, E], write them to the target, and return q [T, H, E], k and v [T, K, E]."""
    q, k, v = rotated(heads, num_heads, tables, norms)
    slots, page_size = target.slots.long(), target.keys.shape[2]
    target.keys[slots // page_size, :, slots % page_size] = k
    target.values[slots // page_size, :, slots % page_size] = v
    if target.heads is None:
        return q, k, v
    torch.cat((q, k, v), dim=1, out=target.heads)
    return as_parts(target.heads, num_heads)


def rotate_and_write(heads: Tensor, num_heads: int, tables: Tables, norms: Norms, *, target: KVTarget) -> Heads:
    """Compute ``reference``: heads [T, H + 2 K, E] -> q [T, H, E], k and v [T, K, E]. May change ``heads``."""
    if not launcher.serves(heads):
        return reference(heads, num_heads, tables, norms, target=target)
    from aioengine.kernels.triton.heads import rotate

    pages = target.slots, target.keys, target.values
    rotate(heads, num_heads, tables, norms, target=pages, out=target.heads)
    return as_parts(heads if target.heads is None else target.heads, num_heads)
