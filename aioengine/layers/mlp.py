"""The MLP of a block.

Shape letters: T tokens, D hidden size, I inner size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.kernels.activation import activate, activate_and_mul
from aioengine.layers.layer import Layer
from aioengine.layers.linear import Linear, Stored
from aioengine.layers.placement import Units

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.families._block_config import Activation, MlpConfig
    from aioengine.layers.adapters import Grouping
    from aioengine.layers.placement import Placement


class MLP(Layer):
    """second(activation(first(x))), or, if it is gated, second(activation(gate(x)) * up(x)): [T, D] -> [T, D].

    Gate and up are one matmul.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        placement: Placement,
        *,
        config: MlpConfig,
        is_transposed: bool = False,
    ) -> None:
        self._activation: Activation = config.activation
        self._is_gated = config.is_gated
        self._has_fused_gate = config.is_gated and config.activation == "silu"
        total = intermediate_size * (2 if config.is_gated else 1)
        sizes = dict.fromkeys(config.first, total // len(config.first))
        stored = Stored(is_transposed=is_transposed)
        self._first = Linear(
            hidden_size,
            sizes,
            placement,
            bias=config.has_bias,
            is_gated=self._has_fused_gate,
            divided="outputs",
            units=[Units(intermediate_size)] * (total // intermediate_size),
            stored=stored,
        )
        second = {config.second: hidden_size}
        self._second = Linear(
            intermediate_size, second, placement, bias=config.has_bias, divided="inputs", stored=stored
        )
        self.parts = ("", self._first), ("", self._second)

    def __call__(self, x: Tensor, rows: Grouping | None = None) -> Tensor:
        """[T, D] -> [T, D]. ``rows``: see ``Linear``."""
        inner = self._first(x, rows)
        if self._has_fused_gate:
            return self._second(inner, rows)
        activate_inner = activate_and_mul if self._is_gated else activate
        return self._second(activate_inner(inner, self._activation), rows)
