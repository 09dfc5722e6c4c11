"""From the projections to what latent attention takes: the key of each token, and the rotated part of its queries.

A head of a query is N numbers that are not rotated and P that are. A key, the same for all heads, is a latent vector of
V numbers, which is normed, and P rotated ones.

T tokens, H query heads, E = V + P key size, B pages of the pool, S page size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.kernels.rms_norm import rms_norm
from aioengine.kernels.rope import rope
from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.kernels.rotate_and_write import KVTarget
    from aioengine.kernels.rotate_heads import Tables

    Norm = tuple[Tensor, Tensor]


def reference(q: Tensor, latents: Tensor, heads: Tensor, *, norm: Norm, tables: Tables) -> None:
    """See ``latent_heads``: q [T, H, N + P], latents [T, V + P], heads [T, H + 1, E]; no pages are written."""
    weight, epsilon = norm
    size, rotated_size = weight.shape[0], latents.shape[1] - weight.shape[0]
    heads[:, :-1, size:] = rope(q[..., q.shape[2] - rotated_size :], *tables)
    heads[:, -1, :size] = rms_norm(latents[:, :size], weight, epsilon)
    heads[:, -1:, size:] = rope(latents[:, None, size:], *tables)


def rotated_queries(q: Tensor, latents: Tensor, *, norm: Norm, tables: Tables, target: KVTarget) -> Tensor:
    """q [T, H, N + P] with its last P numbers rotated, in ``target.heads`` [T, H, N + P] or else in its own memory.

    The keys go to the target; the other arguments are those of ``latent_heads``.
    """
    found = q if target.heads is None else target.heads
    if launcher.serves(q):
        from aioengine.kernels.triton.latent_heads import rotate_queries

        rotate_queries(q, latents, found, norm=norm, tables=tables, target=(target.slots, target.keys))
        return found
    heads = q.new_empty(q.shape[0], q.shape[1] + 1, latents.shape[1])
    reference(q, latents, heads, norm=norm, tables=tables)
    size, latent_size = q.shape[2] - latents.shape[1] + norm[0].shape[0], norm[0].shape[0]
    found[..., :size] = q[..., :size]
    found[..., size:] = heads[:, :-1, latent_size:]
    _write(heads[:, -1:], target)
    return found


def latent_heads(
    q: Tensor, latents: Tensor, heads: Tensor, *, norm: Norm, tables: Tables, target: KVTarget | None
) -> None:
    """Write to ``heads`` [T, H + 1, E] the last P numbers of each query, and as the last head the key.

    Args:
        q: [T, H, N + P]; the first N numbers of a head are not read.
        latents: [T, V + P], of any row stride.
        norm: of the latent vectors, weight [V] and epsilon [] fp32.
        tables: cos and sin [T, 1, P], as ``rope`` takes them.
        target: the slots [T] of the keys [B, 1, S, E] to which the keys are written too; None: to none.
    """
    if launcher.serves(q):
        from aioengine.kernels.triton.latent_heads import rotate

        pages = None if target is None else (target.slots, target.keys)
        rotate(q, latents, heads, norm=norm, tables=tables, target=pages)
        return
    reference(q, latents, heads, norm=norm, tables=tables)
    if target is not None:
        _write(heads[:, -1:], target)


def _write(keys: Tensor, target: KVTarget) -> None:
    """keys [T, 1, E] to their slots."""
    slots, page_size = target.slots.long(), target.keys.shape[2]
    target.keys[slots // page_size, :, slots % page_size] = keys
