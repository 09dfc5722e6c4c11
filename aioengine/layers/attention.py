"""Self-attention with rotary embeddings.

Shape letters: T tokens, S selected tokens, D hidden size, H query heads, K KV heads, E head size, P outputs of the
first matmul.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from aioengine.attention._base import AttentionShape
from aioengine.families._config import DecoderConfig
from aioengine.families._tensors import mixer_linears
from aioengine.kernels.activation import sigmoid_and_mul
from aioengine.kernels.heads import rotate_heads
from aioengine.layers.heads import HeadNorms, pair_order, qkv_order
from aioengine.layers.layer import Placement, Units
from aioengine.layers.linear import Linear
from aioengine.layers.mixer import BlockStep, Mixer


class SelfAttention(Mixer):
    """[T, D] -> [T, D], or [S, D] for selected tokens. Writes keys and values to the KV cache.

    Args:
        shape: of the heads of this rank.
        rope: index of the rotary embedding in ``BlockStep.tables``.
    """

    def __init__(
        self, config: DecoderConfig, layer: int, shape: AttentionShape, placement: Placement, *, rope: int
    ) -> None:
        attention, size, rotation = config.attention, config.head_size, config.rope_of(layer)
        self._rope = rope
        self._num_heads, self._head_size = shape.num_heads, size
        self._gates_size = shape.num_heads * size if attention.has_output_gate else 0
        whole = replace(shape, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads)
        queries, keys = Units(config.num_heads, size), Units(config.num_kv_heads, size)
        rotary_size = size if rotation is None else rotation.rotary_size(size)
        pairs = pair_order(size, rotary_size, is_interleaved=attention.is_interleaved)
        *first, output = mixer_linears(config, layer)
        self._input = Linear.of(
            first,
            placement,
            divided="outputs",
            units=[*[queries] * (1 + attention.has_output_gate), keys, keys],
            order=qkv_order(whole, pairs, attention),
            is_transposed=config.is_transposed,
        )
        self._output = Linear.of(
            [output], placement, divided="inputs", units=[queries], is_transposed=config.is_transposed
        )
        self._clip = attention.clip
        self._head_norms: HeadNorms | None = None
        if attention.head_norm is not None:
            self._head_norms = HeadNorms(attention.head_norm, config.epsilon, whole, placement, pairs=pairs)
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
