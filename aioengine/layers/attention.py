"""Self-attention with rotary embeddings. T tokens, D model size, H query heads, K kv heads, E head size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.kernels.rotate_and_write import KVTarget, rotate_and_write
from aioengine.kernels.rotate_heads import rotate_heads
from aioengine.layers.linear import Linear
from aioengine.layers.norm import RMSNorm

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import AttentionShape, StepAttention
    from aioengine.layers.adapters import AdapterRows
    from aioengine.layers.placement import Placement, Target


class SelfAttention:
    """[T, D] -> [T, D], or [S, D] for selected tokens. Writes keys and values to the KV cache.

    ``head_norm``: epsilon of an RMSNorm of each query and key head; None: no such norm.
    """

    def __init__(
        self,
        hidden_size: int,
        shape: AttentionShape,
        placement: Placement,
        *,
        qkv_bias: bool,
        output_bias: bool,
        head_norm: float | None = None,
    ) -> None:
        self._num_heads, self._head_size = shape.num_heads, shape.head_size
        q_size, kv_size = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self._qkv = Linear(hidden_size, sizes, placement, bias=qkv_bias)
        self._output = Linear(q_size, {"o_proj": hidden_size}, placement, bias=output_bias)
        self._query_norm: RMSNorm | None = None
        self._key_norm: RMSNorm | None = None
        self._norms: tuple[Tensor, Tensor, Tensor] | None = None
        if head_norm is not None:
            query_norm = self._query_norm = RMSNorm(shape.head_size, head_norm, placement)
            key_norm = self._key_norm = RMSNorm(shape.head_size, head_norm, placement)
            self._norms = query_norm.weight, key_norm.weight, query_norm.epsilon

    def weights(self, prefix: str) -> dict[str, Target]:
        found = self._qkv.weights(prefix) | self._output.weights(prefix)
        if self._query_norm and self._key_norm:
            found |= self._query_norm.weights(f"{prefix}q_norm") | self._key_norm.weights(f"{prefix}k_norm")
        return found

    def finish_loading(self) -> None:
        self._qkv.finish_loading()
        self._output.finish_loading()

    def open_for_loading(self) -> None:
        self._qkv.open_for_loading()
        self._output.open_for_loading()

    def linears(self) -> list[Linear]:
        return [self._qkv, self._output]

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
        """x [T, D] -> [T, D], or [S, D] with ``outputs``.

        ``tables``: as ``RotaryEmbedding.tables`` returns them. ``layer``: the index of this layer in the KV cache.
        ``outputs``: [S] int64 indices of the tokens whose results are needed, None for all. Keys and values are
        written for all tokens. ``adapters``: None where no row has one.
        """
        rows = None if adapters is None else adapters.tokens
        heads = self._qkv(x, rows).view(x.shape[0], -1, self._head_size)
        target = attention.target(layer)
        if isinstance(target, KVTarget):
            q, k, v = rotate_and_write(heads, self._num_heads, tables, self._norms, target=target)
        else:
            q, k, v = rotate_heads(heads, self._num_heads, tables, self._norms)
            target(k, v)
        attended = attention.attend(q, k, v, layer)
        if outputs is None:
            return self._output(attended, rows)
        return self._output(attended.index_select(0, outputs), None if adapters is None else adapters.outputs)
