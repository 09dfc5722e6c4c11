"""The order of heads and head entries, and norms of queries and keys.

The kernels expect all query heads, then all key heads, then all value heads, and rotate entry i of the first half of a
head with entry i of the second half. Some checkpoints use other orders. The weights of queries and keys are reordered
in the same way when they are loaded, so dot products do not change.

Shape letters: T tokens, H query heads, K KV heads, E head size, O outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from aioengine.layers.layer import Layer
from aioengine.layers.norm import RMSNorm
from aioengine.layers.placement import Target, Units, rank_ranges

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import AttentionShape
    from aioengine.families._block_config import AttentionConfig, HeadNorm
    from aioengine.layers.placement import Placement


def pair_order(head_size: int, rotary_size: int, *, is_interleaved: bool) -> list[int] | None:
    """Return the checkpoint index of each entry of a head in the order of the kernels; None if the orders are equal.

    The checkpoint rotates the first ``rotary_size`` entries: neighbours (``is_interleaved``), or the first half with
    the second half. The remaining entries are not rotated.
    """
    half, num_unrotated = rotary_size // 2, (head_size - rotary_size) // 2
    if is_interleaved:
        first, second = [*range(0, rotary_size, 2)], [*range(1, rotary_size, 2)]
    else:
        first, second = [*range(half)], [*range(half, rotary_size)]
    unrotated = [*range(rotary_size, head_size)]
    order = [*first, *unrotated[:num_unrotated], *second, *unrotated[num_unrotated:]]
    return None if order == [*range(head_size)] else order


def qkv_order(shape: AttentionShape, pairs: list[int] | None, config: AttentionConfig) -> Tensor | None:
    """Return the checkpoint index of each output of the QKV projection, [O] on the CPU; None if the orders are equal.

    The kernels expect output gates before the queries. ``pairs``: see ``pair_order``.
    """
    if pairs is None and not (config.is_grouped or config.has_output_gate):
        return None
    size, num_heads, num_kv_heads = shape.head_size, shape.num_heads, shape.num_kv_heads
    num_gates = num_heads if config.has_output_gate else 0
    heads = torch.arange((num_gates + num_heads + 2 * num_kv_heads) * size).view(-1, size)
    gates, heads = heads[1 : 2 * num_gates : 2], torch.cat([heads[: 2 * num_gates : 2], heads[2 * num_gates :]])
    if config.is_grouped:
        groups = heads.view(num_kv_heads, -1, size)
        heads = torch.cat([groups[:, :-2].reshape(-1, size), groups[:, -2], groups[:, -1]])
    if pairs is not None:
        rotated, values = heads.split((num_heads + num_kv_heads, num_kv_heads))
        heads = torch.cat([rotated[:, pairs], values])
    return torch.cat([gates, heads]).flatten()


class HeadLayerNorm:
    """LayerNorm of each head: [T, H, E] -> [T, H, E]. Computes in fp32 and rounds once."""

    def __init__(
        self,
        num_weights: int,
        size: int,
        epsilon: float,
        placement: Placement,
        *,
        bias: bool,
        stored: tuple[int, ...],
        order: Tensor | None,
        kept: slice,
    ) -> None:
        """Allocate the weights.

        Args:
            num_weights: 1, or the number of heads if each head has its own weight.
            stored: shape of a tensor in the checkpoint.
            order: [E] int64, the checkpoint index of each entry; None if the orders are equal.
            kept: the weights of the heads of this rank.
        """
        self._epsilon, self._order = epsilon, order
        self._stored, self._kept = stored, kept
        shape = (num_weights, size)
        self._loaded = {
            name: torch.empty(shape, dtype=torch.float32, device=placement.device)
            for name in ("weight", "bias")
            if bias or name == "weight"
        }
        self._used = {name: torch.empty_like(tensor[kept]) for name, tensor in self._loaded.items()}

    def targets(self, names: list[str]) -> dict[str, Target]:
        """Map tensor names to targets. ``names``: one name, or one per head."""
        targets: dict[str, Target] = {}
        for name, tensor in self._loaded.items():
            parts = tensor.view(len(names), *self._stored).unbind()
            targets |= {f"{part}.{name}": Target(row) for part, row in zip(names, parts, strict=True)}
        return targets

    def finish_loading(self) -> None:
        for name, tensor in self._loaded.items():
            ordered = tensor if self._order is None else tensor.index_select(1, self._order)
            self._used[name].copy_(ordered[self._kept])

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H, E] -> [T, H, E]."""
        wide = functional.layer_norm(x.float(), x.shape[-1:], eps=self._epsilon).mul_(self._used["weight"])
        if "bias" in self._used:
            wide.add_(self._used["bias"])
        return wide.to(x.dtype)


def _norm(
    config: HeadNorm,
    num_heads: int,
    epsilon: float,
    placement: Placement,
    *,
    size: int,
    order: Tensor | None,
    kept: slice,
) -> RMSNorm | HeadLayerNorm:
    """Return the norm of queries or keys. ``size``: E. ``order`` [E], ``kept``: see ``HeadLayerNorm``."""
    norm = config.norm
    if norm.kind == "layer":
        num_weights = 1 if config.extent == "head" else num_heads
        return HeadLayerNorm(
            num_weights,
            size,
            epsilon,
            placement,
            bias=norm.has_bias,
            stored=config.shape(num_heads, size),
            order=order,
            kept=slice(None) if config.extent == "head" else kept,
        )
    if config.extent == "all_heads":
        if order is not None:
            order = (torch.arange(num_heads, device=order.device).unsqueeze(1) * size + order).flatten()
        size *= num_heads
    return RMSNorm(size, epsilon, placement, scales_in_fp32=norm.scales_in_fp32, offset=norm.offset, order=order)


class HeadNorms(Layer):
    """The norms of queries and keys.

    Attributes:
        fused: weights [E] of query and key norm, and epsilon [], for the kernel that rotates and norms. None if there
            is no such kernel; then call ``apply`` before the rotation.
    """

    def __init__(
        self,
        config: HeadNorm,
        epsilon: float,
        shape: AttentionShape,
        placement: Placement,
        *,
        pairs: list[int] | None,
    ) -> None:
        """Create the norms.

        Args:
            shape: of the heads of all ranks.
            pairs: order of the E entries, see ``pair_order``; [E].
        """
        self._config = config
        self._num_heads = shape.num_heads, shape.num_kv_heads
        self._kept = [slice(*rank_ranges([Units(count)], placement.shard)[0]) for count in self._num_heads]
        self._shard = placement.shard
        order = None if pairs is None else torch.tensor(pairs, device=placement.device)
        self._norms = [
            _norm(config, num_heads, epsilon, placement, size=shape.head_size, order=order, kept=kept)
            for num_heads, kept in zip(self._num_heads, self._kept, strict=True)
        ]
        self.fused: tuple[Tensor, Tensor, Tensor] | None = None
        query_norm, key_norm = self._norms
        if config.extent == "head" and isinstance(query_norm, RMSNorm) and isinstance(key_norm, RMSNorm):
            self.fused = query_norm.weight, key_norm.weight, query_norm.epsilon

    def own_weights(self) -> dict[str, Target]:
        targets: dict[str, Target] = {}
        for name, norm, num_heads in zip(self._config.names, self._norms, self._num_heads, strict=True):
            names = self._config.parts(name, num_heads)
            targets |= norm.targets(names) if isinstance(norm, HeadLayerNorm) else norm.weights(f"{names[0]}.")
        return targets

    def finish_loading(self) -> None:
        for norm in self._norms:
            norm.finish_loading()

    def apply(self, heads: Tensor) -> None:
        """Normalize queries and keys in heads [T, H + 2 K, E], in place."""
        first = 0
        for norm, kept in zip(self._norms, self._kept, strict=True):
            part = heads.narrow(1, first, kept.stop - kept.start)
            if self._config.extent == "all_heads" and isinstance(norm, RMSNorm) and self._shard.size > 1:
                normed = self._over_ranks(part, norm, kept)
            else:
                normed = norm(part.flatten(1) if self._config.extent == "all_heads" else part)
            part.copy_(normed.view(part.shape))
            first += part.shape[1]

    def _over_ranks(self, part: Tensor, norm: RMSNorm, kept: slice) -> Tensor:
        """Normalize the heads of all ranks together. part: [T, H, E], the heads ``kept`` of this rank."""
        wide = part.flatten(1).float()
        squares = wide.square().mean(-1, keepdim=True)
        if self._shard.group is not None:
            squares = self._shard.group.sum(squares) / self._shard.size  # ranks with the same KV head are as many each
        weight = norm.weight.view(-1, part.shape[-1])[kept].flatten()
        return (wide * (squares + norm.epsilon).rsqrt()).to(weight.dtype).mul_(weight).to(part.dtype)
