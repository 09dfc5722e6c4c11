"""Self-attention with rotary embeddings.

Shape letters: T tokens, S selected tokens, D hidden size, H query heads, K KV heads, E head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.kernels.activation import sigmoid_and_mul
from aioengine.kernels.heads import rotate_heads
from aioengine.layers.heads import HeadNorms, pair_order, qkv_order
from aioengine.layers.layer import Layer
from aioengine.layers.linear import Linear, Stored

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import AttentionShape, StepAttention
    from aioengine.families._block_config import AttentionConfig
    from aioengine.layers.adapters import AdapterRows
    from aioengine.layers.placement import Placement


class SelfAttention(Layer):
    """[T, D] -> [T, D], or [S, D] for selected tokens. Writes keys and values to the KV cache.

    Args:
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
        config: AttentionConfig,
        epsilon: float,
        rotary_size: int,
        is_transposed: bool = False,
    ) -> None:
        self._num_heads, self._head_size = shape.num_heads, shape.head_size
        q_size, kv_size = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self._gates_size = q_size if config.has_output_gate else 0
        sizes = (self._gates_size + q_size, kv_size, kv_size) if len(config.qkv) > 1 else (q_size + 2 * kv_size,)
        pairs = pair_order(shape.head_size, rotary_size, is_interleaved=config.is_interleaved)
        order = qkv_order(shape, pairs, config, placement.device)
        parts = dict(zip(config.qkv, sizes, strict=True))
        stored = Stored(order, is_transposed)
        self._qkv = Linear(hidden_size, parts, placement, bias=config.qkv_bias, stored=stored)
        output = {config.output: hidden_size}
        stored = Stored(is_transposed=is_transposed)
        self._output = Linear(q_size, output, placement, bias=config.output_bias, stored=stored)
        self._clip = config.clip
        self._head_norms: HeadNorms | None = None
        if config.head_norm is not None:
            self._head_norms = HeadNorms(config.head_norm, epsilon, shape, placement, pairs=pairs)
        self._norms = None if self._head_norms is None else self._head_norms.fused
        self.parts = ("", self._qkv), ("", self._output), ("", self._head_norms)

    def __call__(
        self,
        x: Tensor,
        tables: tuple[Tensor, Tensor],
        attention: StepAttention,
        layer: int,
        *,
        outputs: Tensor | None = None,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        """x [T, D] -> [T, D], or [S, D] with ``outputs``. Keys and values of all tokens are written to the KV cache.

        Args:
            tables: see ``RotaryEmbedding.tables``.
            layer: index of this layer in the KV cache.
            outputs: [S] int64 indices of the selected tokens; None for all.
            adapters: None if no row has an adapter.
        """
        rows = None if adapters is None else adapters.tokens
        projected = self._qkv(x, rows)
        heads = projected[:, self._gates_size :] if self._gates_size else projected
        heads = heads.view(x.shape[0], -1, self._head_size)
        if self._clip is not None:
            heads.clamp_(-self._clip, self._clip)
        if self._head_norms is not None and self._norms is None:
            self._head_norms.apply(heads)
        q, k, v = rotate_heads(heads, self._num_heads, tables, self._norms, attention.target(layer))
        attended = attention.attend(q, k, v, layer)
        if self._gates_size:
            attended = sigmoid_and_mul(projected[:, : self._gates_size], attended)
        if outputs is None:
            return self._output(attended, rows)
        return self._output(attended.index_select(0, outputs), None if adapters is None else adapters.outputs)
