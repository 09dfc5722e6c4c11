"""Write q [T, H, E], k and v [T, K, E], which are already rotated, to the KV pool and the attention input."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aioengine.kernels.rotate_and_write import KVTarget
from aioengine.kernels.rotate_heads import as_parts
from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from aioengine.kernels.rotate_heads import Heads


def reference(q: Tensor, k: Tensor, v: Tensor, *, target: KVTarget) -> Heads:
    """Write q [T, H, E], k and v [T, K, E] to the target, and return them."""
    slots, page_size = target.slots.long(), target.keys.shape[2]
    target.keys[slots // page_size, :, slots % page_size] = k
    target.values[slots // page_size, :, slots % page_size] = v
    if target.heads is None:
        return q.contiguous(), k.contiguous(), v.contiguous()
    torch.cat((q, k, v), dim=1, out=target.heads)
    return as_parts(target.heads, q.shape[1])


def write_heads(q: Tensor, k: Tensor, v: Tensor, *, target: KVTarget | Callable[[Tensor, Tensor], None]) -> Heads:
    """Write q [T, H, E], k and v [T, K, E], any strides, to the target, and return them."""
    if not isinstance(target, KVTarget):
        k, v = k.contiguous(), v.contiguous()
        target(k, v)
        return q.contiguous(), k, v
    if not launcher.serves(q):
        return reference(q, k, v, target=target)
    from aioengine.kernels.triton.heads import write

    q, k, v = (heads if heads.stride(-1) == 1 else heads.contiguous() for heads in (q, k, v))
    write(q, k, v, target=(target.slots, target.keys, target.values), out=target.heads)
    return (q.contiguous(), k, v) if target.heads is None else as_parts(target.heads, q.shape[1])
