"""The fused matmul's heads [T, H + 2 K, E] are rotated; k and v [T, K, E] go to their pages [N, K, S, E] too.

What ``rotate_heads`` does, and the way into the KV pool, in one pass over the memory.
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
    """Where k and v of a step's tokens go: slots [T], page id * S + offset, of keys and values [N, K, S, E].

    heads: contiguous [T, H + 2 K, E], where q, k and v are to stand then; None: anywhere.
    """

    slots: Tensor
    keys: Tensor
    values: Tensor
    heads: Tensor | None = None


def reference(heads: Tensor, num_heads: int, tables: Tables, norms: Norms, *, target: KVTarget) -> Heads:
    """heads [T, H + 2 K, E] -> q [T, H, E], k and v [T, K, E], which are in the target too."""
    q, k, v = rotated(heads, num_heads, tables, norms)
    slots, page_size = target.slots.long(), target.keys.shape[2]
    target.keys[slots // page_size, :, slots % page_size] = k
    target.values[slots // page_size, :, slots % page_size] = v
    if target.heads is None:
        return q, k, v
    torch.cat((q, k, v), dim=1, out=target.heads)
    return as_parts(target.heads, num_heads)


def rotate_and_write(heads: Tensor, num_heads: int, tables: Tables, norms: Norms, *, target: KVTarget) -> Heads:
    """heads [T, H + 2 K, E] -> q [T, H, E], k and v [T, K, E]; may use the memory of ``heads``."""
    if not launcher.serves(heads):
        return reference(heads, num_heads, tables, norms, target=target)
    from aioengine.kernels.triton.heads import rotate

    pages = target.slots, target.keys, target.values
    rotate(heads, num_heads, tables, norms, target=pages, out=target.heads)
    return as_parts(heads if target.heads is None else target.heads, num_heads)
