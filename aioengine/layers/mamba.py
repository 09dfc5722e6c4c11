"""Mamba 2, which replaces attention.

Shape letters: T tokens, S selected tokens, D hidden size, P and O sizes of the first and last matmul. Heads,
groups and sizes: see ``kernels.state_space``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aioengine.kernels.activation import activate_and_mul
from aioengine.kernels.causal_conv import causal_conv
from aioengine.kernels.state_space import state_space
from aioengine.kernels.state_types import SpaceWeights
from aioengine.layers.linear import Linear
from aioengine.layers.mixer import Mixer
from aioengine.layers.norm import RMSNorm
from aioengine.layers.placement import Target

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.families._block_config import MambaConfig
    from aioengine.layers.mixer import BlockStep
    from aioengine.layers.placement import Placement


class Mamba(Mixer):
    """[T, D] -> [T, D], or [S, D] for selected tokens."""

    def __init__(self, hidden_size: int, config: MambaConfig, placement: Placement) -> None:
        values = config.num_heads * config.value_size
        self._input = Linear(hidden_size, {"in_proj": config.num_inputs}, placement, bias=config.has_bias)
        self._output = Linear(values, {"out_proj": hidden_size}, placement, bias=config.has_bias)
        self._filter = placement.empty(config.num_channels, config.width)
        self._bias = placement.empty(config.num_channels) if config.has_conv_bias else None
        rates, biases, skips = torch.empty(3, config.num_heads, dtype=torch.float32, device=placement.device)
        self._weights = SpaceWeights(log_rate=rates, bias=biases, skip=skips, limits=config.time_limits)
        self._norm = RMSNorm(values, config.epsilon, placement)
        self._sizes = values, config.num_channels, config.num_heads
        self.parts = ("", self._input), ("norm.", self._norm), ("", self._output)
        self._in_blocks = not placement.batch_invariant and placement.dtype != torch.float32

    def own_weights(self) -> dict[str, Target]:
        targets = {
            "conv1d.weight": Target(self._filter.unsqueeze(1)),
            "A_log": Target(self._weights.log_rate),
            "dt_bias": Target(self._weights.bias),
            "D": Target(self._weights.skip),
        }
        return targets if self._bias is None else {**targets, "conv1d.bias": Target(self._bias)}

    def mix(self, projected: Tensor, step: BlockStep, layer: int) -> tuple[Tensor, Tensor]:
        """projected [T, P] -> heads [T, O] and gates [T, O]; see ``Mixer``."""
        gates, mixed, steps = projected.split(self._sizes, dim=1)
        (inputs, matrices), rows = step.state(layer)
        channels = causal_conv(mixed, self._filter, inputs, rows, bias=self._bias)
        heads = state_space(channels, steps, self._weights, matrices, rows=rows, in_blocks=self._in_blocks)
        return heads.flatten(1), gates

    def finish(self, mixed: Tensor, gates: Tensor) -> Tensor:
        """mixed and gates [S, O] -> [S, O]."""
        return self._norm(activate_and_mul(torch.cat((gates, mixed), dim=1), "silu"))
