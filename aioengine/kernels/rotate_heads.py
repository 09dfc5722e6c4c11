"""Split the fused QKV projection, and rotate queries and keys: heads [T, H + 2 K, E] -> q [T, H, E], k, v [T, K, E].

If the model has QK norms, each query and key head is normalized before the rotation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.kernels.rms_norm import rms_norm
from aioengine.kernels.rope import rope
from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor

    Tables = tuple[Tensor, Tensor]
    Norms = tuple[Tensor, Tensor, Tensor] | None
    Heads = tuple[Tensor, Tensor, Tensor]


def reference(heads: Tensor, num_heads: int, tables: Tables, norms: Norms) -> Heads:
    """Split heads [T, H + 2 K, E] into q [T, H, E], k and v [T, K, E], and rotate q and k.

    Args:
        tables: cos and sin [T, 1, E], as for ``rope``.
        norms: weights [E] for query and key heads, and epsilon [] fp32; None: no norms.
    """
    num_kv_heads = (heads.shape[1] - num_heads) // 2
    rotated, v = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    if norms is None:
        q, k = rope(rotated, *tables).split((num_heads, num_kv_heads), dim=1)
        return q, k, v
    query_weight, key_weight, epsilon = norms
    q, k = rotated.split((num_heads, num_kv_heads), dim=1)
    return rope(rms_norm(q, query_weight, epsilon), *tables), rope(rms_norm(k, key_weight, epsilon), *tables), v


def rotate_heads(heads: Tensor, num_heads: int, tables: Tables, norms: Norms) -> Heads:
    """Compute ``reference``: [T, H + 2 K, E] -> [T, H, E], [T, K, E], [T, K, E]. May change ``heads``."""
    if not launcher.serves(heads):
        return reference(heads, num_heads, tables, norms)
    from aioengine.kernels.triton.heads import rotate

    rotate(heads, num_heads, tables, norms)
    return as_parts(heads, num_heads)


def as_parts(heads: Tensor, num_heads: int) -> Heads:
    """Return q, k and v as views of heads [T, H + 2 K, E]."""
    num_kv_heads = (heads.shape[1] - num_heads) // 2
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return q, k, v
