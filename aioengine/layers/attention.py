"""Self-attention with rotary embeddings.

Shape letters: T tokens, S selected tokens, D hidden size, H query heads, K KV heads, E head size, P outputs of the
first matmul.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from aioengine.kernels.activation import sigmoid_and_mul
from aioengine.kernels.heads import rotate_heads
from aioengine.layers.heads import HeadNorms, pair_order, qkv_order
from aioengine.layers.linear import Linear, Stored
from aioengine.layers.mixer import Mixer
from aioengine.layers.placement import Units

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import AttentionShape
    from aioengine.families._block_config import AttentionConfig
    from aioengine.layers.mixer import BlockStep
    from aioengine.layers.placement import Placement


class SelfAttention(Mixer):
    """[T, D] -> [T, D], or [S, D] for selected tokens. Writes keys and values to the KV cache.

    Args:
        shape: of the heads of this rank.
        num_heads, num_kv_heads: of all ranks.
        rope: index of the rotary embedding in ``BlockStep.tables``.
        epsilon: of the norms of queries and keys.
        rotary_size: number of leading entries of a head that are rotated.
        is_transposed: the checkpoint stores weights as [inputs, outputs].
    """

    def __init__(
        self,
        hidden_size: int,
        shape: AttentionShape,
        placement: Placement,
        *,
        num_heads: int,
        num_kv_heads: int,
        config: AttentionConfig,
        rope: int,
        epsilon: float,
        rotary_size: int,
        is_transposed: bool = False,
    ) -> None:
        self._rope = rope
        self._num_heads, self._head_size = shape.num_heads, shape.head_size
        self._gates_size = shape.num_heads * shape.head_size if config.has_output_gate else 0
        whole = replace(shape, num_heads=num_heads, num_kv_heads=num_kv_heads)
        queries, keys = Units(num_heads, shape.head_size), Units(num_kv_heads, shape.head_size)
        units = [*[queries] * (1 + config.has_output_gate), keys, keys]
        q_size, kv_size = num_heads * shape.head_size, num_kv_heads * shape.head_size
        gates_size = q_size if config.has_output_gate else 0
        sizes = (gates_size + q_size, kv_size, kv_size) if len(config.qkv) > 1 else (q_size + 2 * kv_size,)
        pairs = pair_order(shape.head_size, rotary_size, is_interleaved=config.is_interleaved)
        order = qkv_order(whole, pairs, config)
        parts = dict(zip(config.qkv, sizes, strict=True))
        self._input = Linear(
            hidden_size,
            parts,
            placement,
            bias=config.qkv_bias,
            divided="outputs",
            units=units,
            stored=Stored(order, is_transposed),
        )
        self._output = Linear(
            q_size,
            {config.output: hidden_size},
            placement,
            bias=config.output_bias,
            divided="inputs",
            units=[queries],
            stored=Stored(is_transposed=is_transposed),
        )
        self._clip = config.clip
        self._head_norms: HeadNorms | None = None
        if config.head_norm is not None:
            self._head_norms = HeadNorms(config.head_norm, epsilon, whole, placement, pairs=pairs)
        self._norms = None if self._head_norms is None else self._head_norms.fused
        self.parts = ("", self._input), ("", self._output), ("", self._head_norms)

    def mix(self, projected: Tensor, step: BlockStep, layer: int) -> tuple[Tensor, ...]:
        """projected [T, P] -> attention output, and output gates if there are any: [T, H * E] each."""
        tables, attention = step.tables[self._rope], step.attention
        heads = projected[:, self._gates_size :] if self._gates_size else projected
        heads = heads.view(len(heads), -1, self._head_size)
        if self._clip is not None:
            heads.clamp_(-self._clip, self._clip)
        if self._head_norms is not None and self._norms is None:
            self._head_norms.apply(heads)
        q, k, v = rotate_heads(heads, self._num_heads, tables, self._norms, attention.target(layer))
        attended = attention.attend(q, k, v, layer)
        return (attended, projected[:, : self._gates_size]) if self._gates_size else (attended,)

    def finish(self, mixed: Tensor, gates: Tensor | None = None) -> Tensor:
        """Mixed and gates [S, H * E] -> [S, H * E]."""
        return mixed if gates is None else sigmoid_and_mul(gates, mixed)
