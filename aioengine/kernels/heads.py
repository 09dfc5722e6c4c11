"""Heads of queries, keys and values: rotation, norms, and writes of keys and values to the KV pool.

T tokens, H query heads, K kv heads, E head size.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from aioengine.kernels.kv_target import KVTarget, WriteKV
from aioengine.kernels.norms import rms_norm
from aioengine.kernels.triton import launcher

Norms = tuple[Tensor, Tensor, Tensor]
Heads = tuple[Tensor, Tensor, Tensor]


class RotaryTables:
    """cos and sin of the tokens of a step.

    Attributes:
        pairs: fp32 [T, 2, E / 2], contiguous: cos and sin for the elements i and i + E / 2 of a head.
    """

    def __init__(self, pairs: Tensor) -> None:
        """pairs: [T, 2, E / 2]."""
        self.pairs = pairs

    @cached_property
    def signed(self) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, E], as for ``rope``. The kernels of a GPU do not read them."""
        cos, sin = self.pairs.split(1, dim=1)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate elements i and i + E / 2 of each head in fp32: x [T, H, E], cos and sin [T, 1, E] -> [T, H, E].

    The first half of ``sin`` is negated.
    """
    wide = x.float()
    return (wide * cos).addcmul_(wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def _rope_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Write ``rope`` of x to out, [T, H, E] each, with cos and sin [T, 1, E]. They may be the same tensor."""
    wide = x.float()
    swapped = wide.roll(x.shape[-1] // 2, -1)
    out.copy_(wide.mul_(cos).addcmul_(swapped, sin))


def as_parts(heads: Tensor, num_heads: int) -> Heads:
    """Return q [T, H, E], k and v [T, K, E] as views of heads [T, H + 2 K, E]."""
    num_kv_heads = (heads.shape[1] - num_heads) // 2
    q, k, v = torch.split_with_sizes(heads, (num_heads, num_kv_heads, num_kv_heads), 1)  # ``split`` takes 5 us longer
    return q, k, v


def rotate_heads(
    heads: Tensor,
    num_heads: int,
    tables: RotaryTables,
    norms: Norms | None = None,
    target: KVTarget | WriteKV | None = None,
) -> Heads:
    """Split the fused projection of queries, keys and values, rotate q and k, and write k and v to the target.

    On a GPU one kernel does all of this. Only a target that is a function is called after the kernel.

    Args:
        heads: [T, H + 2 K, E], may be changed.
        num_heads: H.
        norms: weights [E] and epsilon [] fp32 of norms of query and key heads before the rotation.
        target: None: k and v are not written.

    Returns:
        q [T, H, E], k and v [T, K, E].
    """
    kv_target = target if isinstance(target, KVTarget) else None
    if launcher.supports(heads):
        from aioengine.kernels.triton.heads import rotate

        rotate(heads, num_heads, tables.pairs, norms, target=kv_target)
        q, k, v = as_parts(heads if kv_target is None or kv_target.heads is None else kv_target.heads, num_heads)
    else:
        q, k, v = as_parts(heads, num_heads)
        rotated = source = heads[:, : -k.shape[1]]
        if norms is not None:
            query_weight, key_weight, epsilon = norms
            weights = torch.cat((query_weight.expand(num_heads, -1), key_weight.expand(k.shape[1], -1)))
            source = rms_norm(rotated, weights, epsilon)
        _rope_into(rotated, source, *tables.signed)
        if kv_target is not None:
            q, k, v = _written(q, k, v, kv_target)
    if target is not None and not isinstance(target, KVTarget):
        target(k, v)
    return q, k, v


def write_heads(q: Tensor, k: Tensor, v: Tensor, target: KVTarget | WriteKV) -> Heads:
    """Write k and v [T, K, E] to the target, and q [T, H, E] if the target takes it. Return all three.

    They may have any strides.
    """
    if not isinstance(target, KVTarget):
        k, v = k.contiguous(), v.contiguous()
        target(k, v)
        return q.contiguous(), k, v
    if not launcher.supports(q):
        return _written(q, k, v, target)
    from aioengine.kernels.triton.heads import write

    q, k, v = (heads if heads.stride(-1) == 1 else heads.contiguous() for heads in (q, k, v))
    write(q, k, v, target)
    return (q.contiguous(), k, v) if target.heads is None else as_parts(target.heads, q.shape[1])


def _written(q: Tensor, k: Tensor, v: Tensor, target: KVTarget) -> Heads:
    """Write q [T, H, E], k and v [T, K, E] to the target with torch, and return them."""
    target.write(k, v)
    if target.heads is None:
        return q.contiguous(), k.contiguous(), v.contiguous()
    torch.cat((q, k, v), dim=1, out=target.heads)
    return as_parts(target.heads, q.shape[1])


def _transformers_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [1, H, T, E] by cos and sin [1, 1, T, E]. Rounds each product, then their sum."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def can_rotate_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether ``rotate_qk`` has a kernel for q [1, H, T, E], k [1, K, T, E], cos and sin [1, T, E]."""
    shape = (1, q.shape[2], q.shape[3])
    are_alike = q.dtype == k.dtype == cos.dtype == sin.dtype and cos.shape == sin.shape == shape
    return launcher.supports(q) and q.dim() == 4 and are_alike and k.shape == (1, k.shape[1], *shape[1:])


def rotate_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [1, H, T, E] and k [1, K, T, E] by cos and sin [1, T, E], as ``apply_rotary_pos_emb`` of transformers.

    Like transformers, it rounds each product, then their sum. On a GPU ``can_rotate_qk`` must be true, and the results
    have the memory layouts [T, H, E] and [T, K, E]. On a CPU, the rotation of a fallback model is compared with
    it while the model is loaded (``models._fallback_swaps``).
    """
    if not launcher.supports(q):
        return _transformers_rope(q, cos[:, None], sin[:, None]), _transformers_rope(k, cos[:, None], sin[:, None])
    from aioengine.kernels.triton import heads

    tokens_first = [x[0].transpose(0, 1) for x in (q, k)]
    queries, keys = (x if x.stride(-1) == 1 else x.contiguous() for x in tokens_first)
    queries, keys = heads.rotate_qk(queries, keys, cos[0], sin[0])
    return queries.transpose(0, 1)[None], keys.transpose(0, 1)[None]
