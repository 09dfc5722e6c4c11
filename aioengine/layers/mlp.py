"""The MLP of a block.

Shape letters: T tokens, D hidden size, F inner size.
"""

from __future__ import annotations

from torch import Tensor

from aioengine.families._block_config import Activation, MlpConfig
from aioengine.families._tensors import mlp_linears
from aioengine.kernels.activation import activate, activate_and_mul
from aioengine.layers.adapters import Grouping
from aioengine.layers.layer import Layer, Placement, Units
from aioengine.layers.linear import Linear


class MLP(Layer):
    """second(activation(first(x))), or, if it is gated, second(activation(gate(x)) * up(x)): [T, D] -> [T, D].

    Gate and up are one matmul.
    """

    def __init__(
        self, hidden_size: int, inner_size: int, config: MlpConfig, placement: Placement, *, is_transposed: bool = False
    ) -> None:
        self._activation: Activation = config.activation
        self._is_gated = config.is_gated
        self._has_fused_gate = config.is_gated and config.activation == "silu"
        *first, second = mlp_linears(config, hidden_size, inner_size)
        self._first = Linear.of(
            first,
            placement,
            is_gated=self._has_fused_gate,
            divided="outputs",
            units=[Units(inner_size)] * (1 + config.is_gated),
            is_transposed=is_transposed,
        )
        self._second = Linear.of([second], placement, divided="inputs", is_transposed=is_transposed)
        self.parts = ("", self._first), ("", self._second)

    def __call__(self, x: Tensor, grouping: Grouping | None = None) -> Tensor:
        """[T, D] -> [T, D], the part of a rank. grouping: see ``Linear``."""
        inner = self._first(x, grouping)
        if self._has_fused_gate:
            return self._second(inner, grouping)
        activate_inner = activate_and_mul if self._is_gated else activate
        return self._second(activate_inner(inner, self._activation), grouping)
