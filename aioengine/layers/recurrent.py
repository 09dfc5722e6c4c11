"""Layers that replace attention and keep a state per request: gated delta nets, Mamba 2 and short convolutions.

Shape letters: T tokens, S selected tokens, D hidden size, C channels of the convolution, P and O sizes of the first and
last matmul. Heads, groups and sizes: see ``kernels.gated_delta`` and ``kernels.state_space``.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from aioengine.families._block_config import DeltaNetConfig, MambaConfig, ShortConvConfig
from aioengine.families._tensors import stateful_linears, stateful_tensors
from aioengine.kernels.activation import activate_and_mul
from aioengine.kernels.causal_conv import causal_conv
from aioengine.kernels.gated_delta import gated_delta
from aioengine.kernels.norms import gated_rms_norm
from aioengine.kernels.state_space import state_space
from aioengine.kernels.state_types import DeltaGates, SpaceWeights
from aioengine.layers.layer import Placement, Target
from aioengine.layers.linear import Linear
from aioengine.layers.mixer import BlockStep, Mixer
from aioengine.layers.norm import RMSNorm


class RecurrentMixer(Mixer):
    """The base class: first and last matmul, and a convolution. [T, D] -> [T, D], or [S, D] for selected tokens."""

    convolution: ClassVar[str] = "conv1d"

    def __init__(
        self,
        hidden_size: int,
        config: DeltaNetConfig | MambaConfig | ShortConvConfig,
        placement: Placement,
        *,
        order: Tensor | None = None,
    ) -> None:
        """Allocate the weights. ``order``: of the outputs of the first matmul, see ``Linear``; [P]."""
        *first, output = stateful_linears(config, hidden_size)
        self._input, self._output = Linear.of(first, placement, order=order), Linear.of([output], placement)
        self._tensors = {
            name: torch.empty(
                spec.shape,
                dtype=placement.dtype if name.startswith(self.convolution) else torch.float32,
                device=placement.device,
            )
            for name, spec in stateful_tensors(config, hidden_size).items()
            if name != "norm.weight"
        }
        self._filter = self._tensors[f"{self.convolution}.weight"].squeeze(1)
        self._bias = self._tensors.get(f"{self.convolution}.bias")
        self._in_blocks = not placement.batch_invariant and placement.dtype != torch.float32
        self.parts = ("", self._input), ("", self._output)

    def own_weights(self) -> dict[str, Target]:
        return {name: Target(tensor) for name, tensor in self._tensors.items()}


class GatedDeltaNet(RecurrentMixer):
    """The gated delta net, a linear attention.

    One matmul computes queries, keys, values, output gates, and the scores and steps of ``DeltaGates``. Some
    checkpoints order these outputs by key head.
    """

    def __init__(self, hidden_size: int, config: DeltaNetConfig, epsilon: float, placement: Placement) -> None:
        order = _stored_order(config, placement.device) if config.is_grouped else None
        super().__init__(hidden_size, config, placement, order=order)
        self._norm = RMSNorm(config.value_size, epsilon, placement)
        num_heads = config.num_value_heads
        self._sizes = config.num_channels, num_heads * config.value_size, num_heads, num_heads
        self.parts = (*self.parts, ("norm.", self._norm))

    def mix(self, projected: Tensor, step: BlockStep, layer: int) -> tuple[Tensor, Tensor]:
        """projected [T, P] -> heads [T, H, V] and output gates [T, O]; see ``Mixer``."""
        (inputs, matrices), rows = step.state(layer)
        mixed, output_gates, scores, steps = projected.split(self._sizes, dim=1)
        channels = causal_conv(mixed, self._filter, inputs, rows)
        rates, biases = self._tensors["A_log"], self._tensors["dt_bias"]
        gates = DeltaGates(steps=steps, scores=scores, log_rate=rates, bias=biases)
        return gated_delta(channels, gates, matrices, rows, in_blocks=self._in_blocks), output_gates

    def finish(self, mixed: Tensor, gates: Tensor) -> Tensor:
        """mixed [S, H, V] and gates [S, O] -> [S, O]."""
        return gated_rms_norm(mixed, gates, self._norm.weight, self._norm.epsilon)


def _stored_order(config: DeltaNetConfig, device: torch.device) -> Tensor:
    """Return the checkpoint index of each output of the first matmul, within its part: [P] int64."""
    num_groups = config.num_key_heads
    values = config.num_value_heads // num_groups * config.value_size
    sizes = [config.key_size, config.key_size, values, values]
    indices = torch.arange(num_groups * sum(sizes), device=device).view(num_groups, -1)
    heads = torch.arange(2 * config.num_value_heads, device=device).view(num_groups, 2, -1) + indices.numel()
    return torch.cat([part.flatten() for part in (*indices.split(sizes, dim=1), *heads.unbind(1))])


class Mamba(RecurrentMixer):
    """Mamba 2."""

    def __init__(self, hidden_size: int, config: MambaConfig, placement: Placement) -> None:
        super().__init__(hidden_size, config, placement)
        rates, biases, skips = (self._tensors[name] for name in ("A_log", "dt_bias", "D"))
        self._weights = SpaceWeights(log_rate=rates, bias=biases, skip=skips, limits=config.time_limits)
        values = config.num_heads * config.value_size
        self._norm = RMSNorm(values, config.epsilon, placement)
        self._sizes = values, config.num_channels, config.num_heads
        self.parts = (*self.parts, ("norm.", self._norm))

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


class ShortConv(RecurrentMixer):
    """out(b * conv(a * x)), where one matmul computes a, b and x."""

    convolution = "conv"

    def mix(self, projected: Tensor, step: BlockStep, layer: int) -> tuple[Tensor, Tensor]:
        """projected [T, 3 D] -> convolved tokens and their factors, [T, D] each; see ``Mixer``."""
        before, after, channels = projected.chunk(3, dim=1)
        (inputs,), rows = step.state(layer)
        mixed = causal_conv(before * channels, self._filter, inputs, rows, bias=self._bias, activates=False)
        return mixed, after

    def finish(self, mixed: Tensor, gates: Tensor) -> Tensor:
        """mixed and gates [S, D] -> [S, D]."""
        return mixed.mul_(gates)
