"""The order of heads and of the numbers in them, and norms of queries and keys.

The kernels take heads one after the other (queries, keys, values), and rotate the first half of a head with its second
half. Checkpoints have other orders; their weights are brought into this one when they are loaded, queries and keys
alike, which changes no dot product. T tokens, H query heads, K kv heads, E head size, O outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aioengine.layers.norm import RMSNorm

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import AttentionShape
    from aioengine.families._block_config import HeadNorm, NormConfig
    from aioengine.layers.placement import Placement, Target


def pair_order(head_size: int, rotary_size: int, *, is_interleaved: bool) -> list[int] | None:
    """Where the checkpoint has each number of a head, for the kernels' pairs; None: in the same order.

    Of the first ``rotary_size`` numbers the checkpoint pairs neighbours (``is_interleaved``), or the first half with
    the second half. The other numbers are not rotated.
    """
    half, num_others = rotary_size // 2, (head_size - rotary_size) // 2
    if is_interleaved:
        first, second = [*range(0, rotary_size, 2)], [*range(1, rotary_size, 2)]
    else:
        first, second = [*range(half)], [*range(half, rotary_size)]
    others = [*range(rotary_size, head_size)]
    order = [*first, *others[:num_others], *second, *others[num_others:]]
    return None if order == [*range(head_size)] else order


def qkv_order(
    shape: AttentionShape, pairs: list[int] | None, *, is_grouped: bool, device: torch.device
) -> Tensor | None:
    """Where the checkpoint has each output of the layer of queries, keys and values, [O]; None: in the same order.

    ``pairs``: as ``pair_order`` returns it. ``is_grouped``: as in ``AttentionConfig``.
    """
    if pairs is None and not is_grouped:
        return None
    size, num_heads, num_kv_heads = shape.head_size, shape.num_heads, shape.num_kv_heads
    heads = torch.arange((num_heads + 2 * num_kv_heads) * size, device=device).view(-1, size)
    if is_grouped:
        groups = heads.view(num_kv_heads, -1, size)
        heads = torch.cat([groups[:, :-2].reshape(-1, size), groups[:, -2], groups[:, -1]])
    if pairs is not None:
        rotated, values = heads.split((num_heads + num_kv_heads, num_kv_heads))
        heads = torch.cat([rotated[:, pairs], values])
    return heads.flatten()


class HeadNorms:
    """The norms of queries and keys.

    Attributes:
        fused: weights [E] of query and key heads, and epsilon [], for the kernel that rotates; None: ``apply`` is to be
            called before.
    """

    def __init__(
        self,
        config: HeadNorm,
        norm: tuple[NormConfig, float],
        shape: AttentionShape,
        placement: Placement,
        *,
        pairs: list[int] | None,
    ) -> None:
        self._names = config.names
        self._num_heads, self._num_kv_heads, size = shape.num_heads, shape.num_kv_heads, shape.head_size
        (kind, epsilon), is_joint = norm, config.extent == "all_heads"
        order = None if pairs is None else torch.tensor(pairs, device=placement.device)
        assert kind.kind == "rms", "other norms of heads"
        assert order is None or not is_joint, "another order in a norm of all heads"
        self._norms = [
            RMSNorm(
                size * num_heads if is_joint else size,
                epsilon,
                placement,
                is_wide=kind.is_wide,
                offset=kind.offset,
                order=order,
            )
            for num_heads in (self._num_heads, self._num_kv_heads)
        ]
        query_norm, key_norm = self._norms
        self.fused = None if is_joint else (query_norm.weight, key_norm.weight, query_norm.epsilon)

    def weights(self, prefix: str) -> dict[str, Target]:
        query, key = (norm.weights(f"{prefix}{name}") for name, norm in zip(self._names, self._norms, strict=True))
        return query | key

    def finish_loading(self) -> None:
        for norm in self._norms:
            norm.finish_loading()

    def apply(self, heads: Tensor) -> None:
        """Norm the queries and keys in heads [T, H + 2 K, E], in place."""
        first = 0
        for norm, num_heads in zip(self._norms, (self._num_heads, self._num_kv_heads), strict=True):
            part = heads.narrow(1, first, num_heads)
            part.copy_(norm(part.flatten(1)).view(part.shape))
            first += num_heads
