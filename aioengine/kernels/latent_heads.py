"""Inputs of latent attention: the key of each token, and the rotated part of its queries.

A query head has N plain and P rotated elements. All heads share one key: a normalized latent vector of V elements and P
rotated elements.

T tokens, H query heads, E = V + P key size, B pages of the pool, S page size.
"""

from __future__ import annotations

from torch import Tensor

from aioengine.kernels.heads import RotaryTables, rope
from aioengine.kernels.kv_target import KVTarget
from aioengine.kernels.norms import rms_norm
from aioengine.kernels.triton import launcher

Norm = tuple[Tensor, Tensor]


def rotated_queries(q: Tensor, latents: Tensor, *, norm: Norm, tables: RotaryTables, target: KVTarget) -> Tensor:
    """Rotate the last P elements of q [T, H, N + P] and write the keys to the target; arguments as ``latent_heads``.

    Returns the queries [T, H, N + P], in ``target.heads`` if there is one, else in the memory of q.
    """
    out = q if target.heads is None else target.heads
    if launcher.supports(q):
        from aioengine.kernels.triton.latent_heads import rotate

        rotate(q, latents, out, norm=norm, rotation=tables.pairs, target=target)
        return out
    heads = q.new_empty(q.shape[0], q.shape[1] + 1, latents.shape[1])
    latent_heads(q, latents, heads, norm=norm, tables=tables, target=target)
    size, latent_size = q.shape[2] - latents.shape[1] + norm[0].shape[0], norm[0].shape[0]
    out[..., :size] = q[..., :size]
    out[..., size:] = heads[:, :-1, latent_size:]
    return out


def latent_heads(
    q: Tensor, latents: Tensor, heads: Tensor, *, norm: Norm, tables: RotaryTables, target: KVTarget | None
) -> None:
    """Write the rotated P elements of each query, and the key as last head, to ``heads`` [T, H + 1, E].

    Args:
        q: [T, H, N + P]; the first N elements of a head are not read.
        latents: [T, V + P], any row stride.
        norm: weight [V] and epsilon [] fp32 of the norm of latent vectors.
        target: the keys are written there too; None: no such tensor.
    """
    if launcher.supports(q):
        from aioengine.kernels.triton.latent_heads import rotate

        rotate(q, latents, heads, norm=norm, rotation=tables.pairs, target=target)
        return
    weight, epsilon = norm
    size, rotated_size = weight.shape[0], latents.shape[1] - weight.shape[0]
    heads[:, :-1, size:] = rope(q[..., q.shape[2] - rotated_size :], *tables.signed)
    heads[:, -1, :size] = rms_norm(latents[:, :size], weight, epsilon)
    heads[:, -1:, size:] = rope(latents[:, None, size:], *tables.signed)
    if target is not None:
        target.write(heads[:, -1:], heads[:, -1:, :size])
