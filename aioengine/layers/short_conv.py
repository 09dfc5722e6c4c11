"""Short gated convolution, which replaces attention.

Shape letters: T tokens, S selected tokens, D hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.kernels.causal_conv import causal_conv
from aioengine.layers.linear import Linear
from aioengine.layers.mixer import Mixer
from aioengine.layers.placement import Target

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.families._block_config import ShortConvConfig
    from aioengine.layers.mixer import BlockStep
    from aioengine.layers.placement import Placement


class ShortConv(Mixer):
    """out(b * conv(a * x)), where one matmul computes a, b and x: [T, D] -> [T, D], or [S, D] for selected tokens."""

    def __init__(self, hidden_size: int, config: ShortConvConfig, placement: Placement) -> None:
        self._input = Linear(hidden_size, {"in_proj": 3 * hidden_size}, placement, bias=config.has_bias)
        self._output = Linear(hidden_size, {"out_proj": hidden_size}, placement, bias=config.has_bias)
        self._filter = placement.empty(hidden_size, config.width)
        self._bias = placement.empty(hidden_size) if config.has_bias else None
        self.parts = ("", self._input), ("", self._output)

    def own_weights(self) -> dict[str, Target]:
        targets = {"conv.weight": Target(self._filter.unsqueeze(1))}
        return targets if self._bias is None else {**targets, "conv.bias": Target(self._bias)}

    def mix(self, projected: Tensor, step: BlockStep, layer: int) -> tuple[Tensor, Tensor]:
        """projected [T, 3 D] -> convolved tokens and their factors, [T, D] each; see ``Mixer``."""
        before, after, channels = projected.chunk(3, dim=1)
        (inputs,), rows = step.state(layer)
        mixed = causal_conv(before * channels, self._filter, inputs, rows, bias=self._bias, activates=False)
        return mixed, after

    def finish(self, mixed: Tensor, gates: Tensor) -> Tensor:
        """mixed and gates [S, D] -> [S, D]."""
        return mixed.mul_(gates)
