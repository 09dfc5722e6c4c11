"""Short gated convolution, which replaces attention.

Shape letters: T tokens, S selected tokens, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.kernels.causal_conv import causal_conv
from aioengine.layers.linear import Linear
from aioengine.layers.placement import Target
from aioengine.layers.state_layer import StateLayer

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.families._block_config import ShortConvConfig
    from aioengine.layers.placement import Placement
    from aioengine.layers.states import StepStates


class ShortConv(StateLayer):
    """out(b * conv(a * x)), where one matmul computes a, b and x: [T, D] -> [T, D], or [S, D] for selected tokens."""

    def __init__(self, hidden_size: int, config: ShortConvConfig, placement: Placement) -> None:
        self._input = Linear(hidden_size, {"in_proj": 3 * hidden_size}, placement, bias=config.has_bias)
        self._output = Linear(hidden_size, {"out_proj": hidden_size}, placement, bias=config.has_bias)
        self._filter = placement.empty(hidden_size, config.width)
        self._bias = placement.empty(hidden_size) if config.has_bias else None
        self.parts = ("", self._input), ("", self._output)

    def tensors(self) -> dict[str, Target]:
        targets = {"conv.weight": Target(self._filter.unsqueeze(1))}
        return targets if self._bias is None else {**targets, "conv.bias": Target(self._bias)}

    def mix(self, projected: Tensor, states: StepStates, layer: int) -> tuple[Tensor, Tensor]:
        """projected [T, 3 D] -> convolved tokens and their factors, [T, D] each; see ``StateLayer``."""
        before, after, channels = projected.chunk(3, dim=1)
        (inputs,) = states.layer(layer)
        mixed = causal_conv(before * channels, self._filter, inputs, states.rows, bias=self._bias, activates=False)
        return mixed, after

    def gate(self, mixed: Tensor, gates: Tensor) -> Tensor:
        """mixed and gates [S, D] -> [S, D]."""
        return mixed.mul_(gates)
