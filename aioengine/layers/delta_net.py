"""The gated delta net, a linear attention.

Shape letters: T tokens, S selected tokens, D hidden size, O outputs, H heads, V value size. Heads and sizes: see
``kernels.gated_delta``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aioengine.kernels.causal_conv import causal_conv
from aioengine.kernels.gated_delta import gated_delta
from aioengine.kernels.norms import gated_rms_norm
from aioengine.kernels.state_types import DeltaGates
from aioengine.layers.linear import Linear, Stored
from aioengine.layers.mixer import Mixer
from aioengine.layers.norm import RMSNorm
from aioengine.layers.placement import Target

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.families._block_config import DeltaNetConfig
    from aioengine.layers.mixer import BlockStep
    from aioengine.layers.placement import Placement


class GatedDeltaNet(Mixer):
    """[T, D] -> [T, D], or [S, D] for selected tokens.

    One matmul computes queries, keys, values, output gates, and the scores and steps of ``DeltaGates``. Some
    checkpoints order these outputs by key head.
    """

    def __init__(self, hidden_size: int, config: DeltaNetConfig, epsilon: float, placement: Placement) -> None:
        num_heads, values = config.num_value_heads, config.num_value_heads * config.value_size
        stored = Stored(_stored_order(config, placement.device) if config.is_grouped else None)
        self._input = Linear(hidden_size, config.inputs, placement, stored=stored)
        self._output = Linear(values, {"out_proj": hidden_size}, placement)
        self._filter = placement.empty(config.num_channels, config.width)
        self._norm = RMSNorm(config.value_size, epsilon, placement)
        self._log_rate, self._bias = torch.empty(2, num_heads, dtype=torch.float32, device=placement.device)
        self._in_blocks = not placement.batch_invariant and placement.dtype != torch.float32
        self._sizes = config.num_channels, values, num_heads, num_heads
        self.parts = ("", self._input), ("norm.", self._norm), ("", self._output)

    def own_weights(self) -> dict[str, Target]:
        return {
            "conv1d.weight": Target(self._filter.unsqueeze(1)),
            "A_log": Target(self._log_rate),
            "dt_bias": Target(self._bias),
        }

    def mix(self, projected: Tensor, step: BlockStep, layer: int) -> tuple[Tensor, Tensor]:
        """projected [T, O] -> heads [T, H, V] and output gates [T, O]; see ``Mixer``."""
        (inputs, matrices), rows = step.state(layer)
        mixed, output_gates, scores, steps = projected.split(self._sizes, dim=1)
        channels = causal_conv(mixed, self._filter, inputs, rows)
        gates = DeltaGates(steps=steps, scores=scores, log_rate=self._log_rate, bias=self._bias)
        return gated_delta(channels, gates, matrices, rows, in_blocks=self._in_blocks), output_gates

    def finish(self, mixed: Tensor, gates: Tensor) -> Tensor:
        """mixed [S, H, V] and gates [S, O] -> [S, O]."""
        return gated_rms_norm(mixed, gates, self._norm.weight, self._norm.epsilon)


def _stored_order(config: DeltaNetConfig, device: torch.device) -> Tensor:
    """Return the checkpoint index of each output of the first matmul, within its part: [O] int64."""
    num_groups = config.num_key_heads
    values = config.num_value_heads // num_groups * config.value_size
    sizes = [config.key_size, config.key_size, values, values]
    indices = torch.arange(num_groups * sum(sizes), device=device).view(num_groups, -1)
    heads = torch.arange(2 * config.num_value_heads, device=device).view(num_groups, 2, -1) + indices.numel()
    return torch.cat([part.flatten() for part in (*indices.split(sizes, dim=1), *heads.unbind(1))])
