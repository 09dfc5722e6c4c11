"""The fused product's heads [T, H + 2 K, E] are rotated; k and v go to their pages [N, K, S, E], q [T, H, E] is left.

What ``rotate_heads`` does, and the way into the KV pool, in one pass over the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aioengine.kernels import _triton
from aioengine.kernels.rotate_heads import reference as rotated

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.kernels.rotate_heads import Norms, Tables


@dataclass(frozen=True, slots=True)
class KVTarget:
    """Where k and v of a step's tokens go: slots [T], page id * S + offset, of keys and values [N, K, S, E]."""

    slots: Tensor
    keys: Tensor
    values: Tensor


def reference(heads: Tensor, num_heads: int, tables: Tables, norms: Norms, *, target: KVTarget) -> Tensor:
    q, k, v = rotated(heads, num_heads, tables, norms)
    slots, page_size = target.slots.long(), target.keys.shape[2]
    target.keys[slots // page_size, :, slots % page_size] = k
    target.values[slots // page_size, :, slots % page_size] = v
    return q


def rotate_and_write(heads: Tensor, num_heads: int, tables: Tables, norms: Norms, *, target: KVTarget) -> Tensor:
    """May use the memory of ``heads``."""
    if not _triton.serves(heads):
        return reference(heads, num_heads, tables, norms, target=target)
    from aioengine.kernels import _triton_heads

    _triton_heads.rotate(heads, num_heads, tables, norms, target=(target.slots, target.keys, target.values))
    return heads[:, :num_heads]
