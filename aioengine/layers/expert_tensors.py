"""Tensors to load experts into, in the layouts of checkpoints.

Shape letters: D hidden size, I inner size, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from aioengine.families._experts import MXFP4_BLOCK
from aioengine.kernels import mxfp4
from aioengine.kernels.expert_types import ExpertWeights, GateFunction
from aioengine.layers.placement import Target

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.families._experts import ExpertsConfig
    from aioengine.layers.placement import Placement


class ExpertTensors(Protocol):
    """Tensors to load into, in the layout of the checkpoint."""

    def targets(self) -> dict[str, Target]:
        """Map tensor names within the MLP to targets."""
        ...

    def assemble(self) -> ExpertWeights:
        """Return the weights in the layout of the kernels, and free the loaded tensors."""
        ...


def empty(config: ExpertsConfig, hidden_size: int, placement: Placement) -> ExpertTensors:
    """Return uninitialized tensors in the layout of the checkpoint."""
    if config.stored == "mxfp4":
        return _Mxfp4Tensors(config, hidden_size, placement)
    num_experts, inner = config.num_experts, config.inner_size
    if config.stored == "interleaved":
        matrices = (
            placement.empty(num_experts, hidden_size, 2 * inner),
            placement.empty(num_experts, inner, hidden_size),
        )
        biases = placement.empty(num_experts, 2 * inner), placement.empty(num_experts, hidden_size)
        return _InterleavedTensors(config, matrices, biases)
    weights = ExpertWeights(
        placement.empty(num_experts, 2 * inner, hidden_size),
        placement.empty(num_experts, hidden_size, inner),
        gate=gate_of(config),
    )
    return reopened(config, weights)


def reopened(config: ExpertsConfig, weights: ExpertWeights) -> ExpertTensors:
    """Return tensors with the values of ``weights``, possibly as views. Those of "mxfp4" are not quantized."""
    match config.stored:
        case "separate":
            return _SeparateTensors(config, weights)
        case "packed":
            return _PackedTensors(config, weights)
        case "interleaved" | "mxfp4":
            assert weights.gate_up_bias is not None
            assert weights.down_bias is not None
            gate_up, gate_up_bias = _interleave(weights.gate_up), _interleave(weights.gate_up_bias)
            matrices = gate_up.transpose(1, 2).contiguous(), weights.down.transpose(1, 2).contiguous()
            return _InterleavedTensors(config, matrices, (gate_up_bias, weights.down_bias))


def _interleave(tensor: Tensor) -> Tensor:
    """[E, 2 I, ...] with gates first -> [E, 2 I, ...] with gate and up rows alternating."""
    return tensor.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _gates_first(tensor: Tensor) -> Tensor:
    """[E, 2 I, ...] with gate and up rows alternating -> [E, 2 I, ...] with gates first."""
    return tensor.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


class _SeparateTensors:
    """Views of the weights: gate, up and down matrices of each expert."""

    def __init__(self, config: ExpertsConfig, weights: ExpertWeights) -> None:
        self._config = config
        self._weights = weights

    def targets(self) -> dict[str, Target]:
        gate_name, up_name, down_name = self._config.names
        targets: dict[str, Target] = {}
        for expert, (gate_up, down) in enumerate(zip(self._weights.gate_up, self._weights.down, strict=True)):
            gate, up = gate_up.chunk(2)
            for name, tensor in ((gate_name, gate), (up_name, up), (down_name, down)):
                targets[f"experts.{expert}.{name}.weight"] = Target(tensor)
        return targets

    def assemble(self) -> ExpertWeights:
        return self._weights


class _PackedTensors:
    """The weights themselves: gate_up [E, 2 I, D] and down [E, D, I]."""

    def __init__(self, config: ExpertsConfig, weights: ExpertWeights) -> None:
        self._config = config
        self._weights = weights

    def targets(self) -> dict[str, Target]:
        gate_up, down = self._config.names
        return {gate_up: Target(self._weights.gate_up), down: Target(self._weights.down)}

    def assemble(self) -> ExpertWeights:
        return self._weights


class _InterleavedTensors:
    """gate_up [E, D, 2 I] and bias [E, 2 I] with gate and up rows alternating; down [E, I, D] and bias [E, D]."""

    def __init__(self, config: ExpertsConfig, matrices: tuple[Tensor, Tensor], biases: tuple[Tensor, Tensor]) -> None:
        """matrices: [E, D, 2 I] and [E, I, D]; biases: [E, 2 I] and [E, D]."""
        self._config = config
        self._tensors: dict[str, Tensor] = {}
        for name, matrix, bias in zip(config.names, matrices, biases, strict=True):
            self._tensors |= {name: matrix, f"{name}_bias": bias}

    def targets(self) -> dict[str, Target]:
        return {name: Target(tensor) for name, tensor in self._tensors.items()}

    def assemble(self) -> ExpertWeights:
        gate_up, down = self._config.names
        tensors = self._tensors
        gate_up_bias, down_bias = _gates_first(tensors[f"{gate_up}_bias"]), tensors[f"{down}_bias"]
        gates = _gates_first(tensors.pop(gate_up).transpose(1, 2)).contiguous()
        downs = tensors.pop(down).transpose(1, 2).contiguous()
        return ExpertWeights(gates, downs, gate_up_bias.contiguous(), down_bias, gate_of(self._config))


class _Mxfp4Tensors:
    """MXFP4 blocks and scales in uint8 of gate_up, with gate and up rows alternating, and of down; and biases."""

    def __init__(self, config: ExpertsConfig, hidden_size: int, placement: Placement) -> None:
        self._config = config
        self._dtype = placement.dtype
        self._tensors: dict[str, Tensor] = {}
        num_experts = config.num_experts
        sizes = ((2 * config.inner_size, hidden_size), (hidden_size, config.inner_size))
        for name, (rows, columns) in zip(config.names, sizes, strict=True):
            scales = num_experts, rows, columns // MXFP4_BLOCK
            for part, shape in (("blocks", (*scales, MXFP4_BLOCK // 2)), ("scales", scales)):
                self._tensors[f"{name}_{part}"] = torch.empty(shape, dtype=torch.uint8, device=placement.device)
            self._tensors[f"{name}_bias"] = placement.empty(num_experts, rows)

    def targets(self) -> dict[str, Target]:
        return {name: Target(tensor) for name, tensor in self._tensors.items()}

    def assemble(self) -> ExpertWeights:
        gate_up_name, down_name = self._config.names
        gate_up, down = self._dequantized(gate_up_name, is_gated=True), self._dequantized(down_name, is_gated=False)
        gate_up_bias, down_bias = self._tensors[f"{gate_up_name}_bias"], self._tensors[f"{down_name}_bias"]
        gate_up_bias = _gates_first(gate_up_bias).contiguous()
        return ExpertWeights(gate_up, down, gate_up_bias, down_bias, gate_of(self._config))

    def _dequantized(self, name: str, *, is_gated: bool) -> Tensor:
        """Return [E, outputs, inputs] with gates first. Converts expert by expert to bound the temporary memory."""
        blocks, scales = self._tensors.pop(f"{name}_blocks"), self._tensors.pop(f"{name}_scales")
        shape = *scales.shape[:2], scales.shape[2] * MXFP4_BLOCK
        weights = torch.empty(shape, dtype=self._dtype, device=blocks.device)
        for weight, expert_blocks, expert_scales in zip(weights, blocks, scales, strict=True):
            values = mxfp4.dequantize(expert_blocks, expert_scales, self._dtype)
            weight.copy_(_gates_first(values.unsqueeze(0))[0] if is_gated else values)
        return weights


def gate_of(config: ExpertsConfig) -> GateFunction:
    return GateFunction(config.limit, config.alpha)
