"""The order of heads and of the numbers in them, and norms of queries and keys.

The kernels take heads one after the other (queries, keys, values), and rotate the first half of a head with its second
half. Checkpoints have other orders; their weights are brought into this one when they are loaded, queries and keys
alike, which changes no dot product. T tokens, H query heads, K kv heads, E head size, O outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from aioengine.layers.norm import RMSNorm
from aioengine.layers.placement import Target

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import AttentionShape
    from aioengine.families._block_config import AttentionConfig, HeadNorm
    from aioengine.layers.placement import Placement


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
    shape: AttentionShape, pairs: list[int] | None, config: AttentionConfig, device: torch.device
) -> Tensor | None:
    """Where the checkpoint has each output of the layer of queries, keys and values, [O]; None: in the same order.

    ``pairs``: as ``pair_order`` returns it. Gates of the outputs come before the queries.
    """
    if pairs is None and not (config.is_grouped or config.has_output_gate):
        return None
    size, num_heads, num_kv_heads = shape.head_size, shape.num_heads, shape.num_kv_heads
    num_gates = num_heads if config.has_output_gate else 0
    heads = torch.arange((num_gates + num_heads + 2 * num_kv_heads) * size, device=device).view(-1, size)
    gates, heads = heads[1 : 2 * num_gates : 2], torch.cat([heads[: 2 * num_gates : 2], heads[2 * num_gates :]])
    if config.is_grouped:
        groups = heads.view(num_kv_heads, -1, size)
        heads = torch.cat([groups[:, :-2].reshape(-1, size), groups[:, -2], groups[:, -1]])
    if pairs is not None:
        rotated, values = heads.split((num_heads + num_kv_heads, num_kv_heads))
        heads = torch.cat([rotated[:, pairs], values])
    return torch.cat([gates, heads]).flatten()


class HeadLayerNorm:
    """LayerNorm of each head, [T, H, E] -> [T, H, E]; computed in fp32 and rounded once."""

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
    ) -> None:
        """Make the norm.

        Args:
            num_weights: 1, or the number of heads where each has a weight of its own.
            stored: the shape of a tensor in the checkpoint.
            order: [E] int64 indices of the loaded weights; None: in the same order.
        """
        self._epsilon, self._order = epsilon, order
        self._stored = stored
        shape = (num_weights, size)
        self._loaded = {
            name: torch.empty(shape, dtype=torch.float32, device=placement.device)
            for name in ("weight", "bias")
            if bias or name == "weight"
        }
        self._used = {name: torch.empty_like(tensor) for name, tensor in self._loaded.items()}

    def weights(self, names: list[str]) -> dict[str, Target]:
        """``names``: of the norm, or of the norm of each head."""
        found: dict[str, Target] = {}
        for name, tensor in self._loaded.items():
            parts = tensor.view(len(names), *self._stored).unbind()
            found |= {f"{part}.{name}": Target(row) for part, row in zip(names, parts, strict=True)}
        return found

    def finish_loading(self) -> None:
        for name, tensor in self._loaded.items():
            self._used[name].copy_(tensor if self._order is None else tensor.index_select(1, self._order))

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H, E] -> [T, H, E]."""
        wide = functional.layer_norm(x.float(), x.shape[-1:], eps=self._epsilon).mul_(self._used["weight"])
        if "bias" in self._used:
            wide.add_(self._used["bias"])
        return wide.to(x.dtype)


def _norm(
    config: HeadNorm, num_heads: int, epsilon: float, placement: Placement, *, size: int, order: Tensor | None
) -> RMSNorm | HeadLayerNorm:
    """``size``: E. ``order``: [E], as in ``HeadLayerNorm``."""
    norm = config.norm
    if norm.kind == "layer":
        num_weights = 1 if config.extent == "head" else num_heads
        stored = config.shape(num_heads, size)
        return HeadLayerNorm(num_weights, size, epsilon, placement, bias=norm.has_bias, stored=stored, order=order)
    if config.extent == "all_heads":
        if order is not None:
            order = (torch.arange(num_heads, device=order.device).unsqueeze(1) * size + order).flatten()
        size *= num_heads
    return RMSNorm(size, epsilon, placement, is_wide=norm.is_wide, offset=norm.offset, order=order)


class HeadNorms:
    """The norms of queries and keys.

    Attributes:
        fused: weights [E] of query and key heads, and epsilon [], for the kernel that rotates; None: ``apply`` is to be
            called before.
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
        """``pairs``: as ``pair_order`` returns it, of [E] numbers."""
        self._config = config
        self._num_heads = shape.num_heads, shape.num_kv_heads
        order = None if pairs is None else torch.tensor(pairs, device=placement.device)
        self._norms = [
            _norm(config, num_heads, epsilon, placement, size=shape.head_size, order=order)
            for num_heads in self._num_heads
        ]
        self.fused: tuple[Tensor, Tensor, Tensor] | None = None
        query_norm, key_norm = self._norms
        if config.extent == "head" and isinstance(query_norm, RMSNorm) and isinstance(key_norm, RMSNorm):
            self.fused = query_norm.weight, key_norm.weight, query_norm.epsilon

    def weights(self, prefix: str) -> dict[str, Target]:
        found: dict[str, Target] = {}
        for name, norm, num_heads in zip(self._config.names, self._norms, self._num_heads, strict=True):
            names = [f"{prefix}{part}" for part in self._config.parts(name, num_heads)]
            found |= norm.weights(names) if isinstance(norm, HeadLayerNorm) else norm.weights(names[0])
        return found

    def finish_loading(self) -> None:
        for norm in self._norms:
            norm.finish_loading()

    def apply(self, heads: Tensor) -> None:
        """Norm the queries and keys in heads [T, H + 2 K, E], in place."""
        first = 0
        for norm, num_heads in zip(self._norms, self._num_heads, strict=True):
            part = heads.narrow(1, first, num_heads)
            given = part.flatten(1) if self._config.extent == "all_heads" else part
            part.copy_(norm(given).view(part.shape))
            first += num_heads
