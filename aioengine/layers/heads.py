"""The order of heads and head entries, and norms of queries and keys.

The kernels expect all query heads, then all key heads, then all value heads. They rotate entry i of the first half of a
head with entry i of the second half. Some checkpoints use other orders. The weights of queries and keys are reordered
in the same way when they are loaded, so dot products do not change.

Shape letters: T tokens, H query heads, K KV heads, E head size, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from aioengine.attention._base import AttentionShape
from aioengine.families._block_config import AttentionConfig, HeadNorm
from aioengine.layers.layer import Layer, Placement, Target, Units, rank_ranges
from aioengine.layers.norm import RMSNorm


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
    queries_and_gates, others = heads.split((2 * num_gates, len(heads) - 2 * num_gates))
    gates, heads = queries_and_gates[1::2], torch.cat([queries_and_gates[::2], others])
    if config.is_grouped:
        groups = heads.view(num_kv_heads, -1, size)
        heads = torch.cat([groups[:, :-2].reshape(-1, size), groups[:, -2], groups[:, -1]])
    if pairs is not None:
        rotated, values = heads.split((num_heads + num_kv_heads, num_kv_heads))
        heads = torch.cat([rotated[:, pairs], values])
    return torch.cat([gates, heads]).flatten()


class HeadLayerNorm(Layer):
    """LayerNorm of each head: [T, H, E] -> [T, H, E]. Computes in fp32 and rounds once."""

    def __init__(
        self,
        config: HeadNorm,
        num_heads: int,
        size: int,
        epsilon: float,
        placement: Placement,
        *,
        order: Tensor | None,
        kept: slice,
    ) -> None:
        """Allocate the weights.

        Args:
            order: [E] int64, the checkpoint index of each entry; None if the orders are equal.
            kept: the heads of this rank.
        """
        self._config, self._epsilon, self._order = config, epsilon, order
        self._stored = config.shape(num_heads, size)
        self._kept = slice(None) if config.extent == "head" else kept
        shape = 1 if config.extent == "head" else num_heads, size
        names = ("weight", "bias") if config.norm.has_bias else ("weight",)
        self._loaded = {name: torch.empty(shape, dtype=torch.float32, device=placement.device) for name in names}
        self._used = {name: torch.empty_like(tensor[self._kept]) for name, tensor in self._loaded.items()}

    def own_weights(self) -> dict[str, Target]:
        if self._config.extent == "list":
            rows = [(name, head, row) for name, rows in self._loaded.items() for head, row in enumerate(rows)]
            return {f"norms.{head}.{name}": Target(row) for name, head, row in rows}
        return {name: Target(tensor.view(self._stored)) for name, tensor in self._loaded.items()}

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


class HeadNorms(Layer):
    """The norms of queries and keys.

    Attributes:
        fused: weights [E] of query and key norm, and epsilon [], for the kernel that rotates and norms. None if there
            is no such kernel; then call ``apply`` before the rotation.
    """

    def __init__(
        self, config: HeadNorm, epsilon: float, shape: AttentionShape, placement: Placement, *, pairs: list[int] | None
    ) -> None:
        """Create the norms.

        Args:
            shape: of the heads of all ranks.
            pairs: order of the E entries, see ``pair_order``; [E].
        """
        self._config, self._shard, norm = config, placement.shard, config.norm
        order = None if pairs is None else torch.tensor(pairs, device=placement.device)
        self._kept: list[slice] = []
        self._norms: list[RMSNorm | HeadLayerNorm] = []
        for num_heads in (shape.num_heads, shape.num_kv_heads):
            kept, size, own_order = slice(*rank_ranges([Units(num_heads)], placement.shard)[0]), shape.head_size, order
            self._kept.append(kept)
            if norm.kind == "layer":
                self._norms.append(HeadLayerNorm(config, num_heads, size, epsilon, placement, order=order, kept=kept))
                continue
            if config.extent == "all_heads":
                if order is not None:
                    own_order = (torch.arange(num_heads, device=order.device).unsqueeze(1) * size + order).flatten()
                size *= num_heads
            options = {"scales_in_fp32": norm.scales_in_fp32, "offset": norm.offset, "order": own_order}
            self._norms.append(RMSNorm(size, epsilon, placement, **options))
        self.parts = [(f"{name}.", part) for name, part in zip(config.names, self._norms, strict=True)]
        self.fused: tuple[Tensor, Tensor, Tensor] | None = None
        query_norm, key_norm = self._norms
        if config.extent == "head" and isinstance(query_norm, RMSNorm) and isinstance(key_norm, RMSNorm):
            self.fused = query_norm.weight, key_norm.weight, query_norm.epsilon

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
            # Each KV head is on the same number of ranks, so the mean over the ranks is the mean over all heads.
            squares = self._shard.group.all_reduce(squares) / self._shard.size
        weight = norm.weight.view(-1, part.shape[-1])[kept].flatten()
        return (wide * (squares + norm.epsilon).rsqrt()).to(weight.dtype).mul_(weight).to(part.dtype)
