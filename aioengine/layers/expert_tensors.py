"""Tensors to load experts into, in the layouts of checkpoints, quantized or not.

Shape letters: D hidden size, F inner size, E experts, O outputs of an expert, I inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from aioengine.families._experts import MXFP4_BLOCK, ExpertsConfig
from aioengine.families._tensors import expert_tensors as checkpoint_tensors
from aioengine.kernels import mxfp4
from aioengine.kernels.codes import EXPONENT_BIAS, Codes
from aioengine.kernels.expert_types import ExpertWeights, GateFunction
from aioengine.layers.layer import Placement, Slice, Target
from aioengine.layers.linear import unplaced_targets
from aioengine.quantization._base import CodesFormat, LinearSpec, Tensors


class ExpertTensors(NamedTuple):
    """The tensors of the experts of a layer.

    Attributes:
        tensors: by name within the MLP, in the layout of the checkpoint.
        assemble: returns the weights in the layout of the kernels, and frees the loaded tensors.
    """

    tensors: Tensors
    assemble: Callable[[], ExpertWeights]


def empty(config: ExpertsConfig, hidden_size: int, placement: Placement) -> ExpertTensors:
    """Return uninitialized tensors in the layout of the checkpoint."""
    num_experts, inner = config.num_experts, config.inner_size
    if config.stored in ("separate", "packed"):
        matrices = (
            placement.empty(num_experts, 2 * inner, hidden_size),
            placement.empty(num_experts, hidden_size, inner),
        )
        return reopened(config, ExpertWeights(*matrices, gate=gate_function(config)), {})
    tensors = {
        name: torch.empty(spec.shape, dtype=torch.uint8 if spec.dtype else placement.dtype, device=placement.device)
        for name, spec in checkpoint_tensors(config, hidden_size).items()
        if name.startswith(config.names)
    }
    if config.stored == "mxfp4":
        for scales in (tensor for name, tensor in tensors.items() if name.endswith("_scales")):
            inputs = scales.shape[2] * MXFP4_BLOCK  # see ``Target.is_preset``
            scales.fill_(round(EXPONENT_BIAS - math.log2(mxfp4.SPREAD * inputs**0.5)))
        wide = placement.dtype if placement.device.type == "cpu" else None  # torch has no product for MXFP4 on a CPU
        return ExpertTensors(tensors, lambda: _from_mxfp4(config, tensors, wide))
    return ExpertTensors(tensors, lambda: _from_interleaved(config, tensors))


def source(config: ExpertsConfig, name: str, inner_range: tuple[int, int], inner_size: int) -> Slice | None:
    """Return the part of a tensor of all experts that a rank loads; None for all of it.

    inner_range: the part of F that the rank has. inner_size: F of all ranks.
    """
    start, stop = inner_range
    gate_up, down = config.names
    if config.stored == "packed":
        if name == gate_up:
            return Slice(1, (inner_range, (inner_size + start, inner_size + stop)), 2 * inner_size)
        return Slice(2, (inner_range,), inner_size)
    if name.startswith(gate_up):  # gate and up rows alternate
        return Slice(2 if name == gate_up else 1, ((2 * start, 2 * stop),), 2 * inner_size)
    if name == f"{down}_bias":
        return None
    if name == down:
        return Slice(1, (inner_range,), inner_size)
    return Slice(2, ((start // MXFP4_BLOCK, stop // MXFP4_BLOCK),), inner_size // MXFP4_BLOCK)


def reopened(config: ExpertsConfig, weights: ExpertWeights, scales: Tensors) -> ExpertTensors:
    """Return tensors with the values of ``weights``, possibly as views.

    scales: those of dequantized MXFP4 weights.
    """
    if config.stored == "mxfp4":
        return _as_mxfp4(config, weights, scales)
    assert isinstance(weights.gate_up, torch.Tensor)
    assert isinstance(weights.down, torch.Tensor)
    if config.stored == "packed":
        gate_up, down = config.names
        return ExpertTensors({gate_up: weights.gate_up, down: weights.down}, lambda: weights)
    tensors: Tensors = {}
    if config.stored == "separate":
        for expert, (gate_up_matrix, down_matrix) in enumerate(zip(weights.gate_up, weights.down, strict=True)):
            matrices = *gate_up_matrix.chunk(2), down_matrix
            for name, matrix in zip(config.names, matrices, strict=True):
                tensors[f"experts.{expert}.{name}.weight"] = matrix
        return ExpertTensors(tensors, lambda: weights)
    gate_up, down = config.names
    tensors[gate_up] = _interleave(weights.gate_up).transpose(1, 2).contiguous()
    tensors[down] = weights.down.transpose(1, 2).contiguous()
    tensors |= _biases(config, weights)
    return ExpertTensors(tensors, lambda: _from_interleaved(config, tensors))


def _as_mxfp4(config: ExpertsConfig, weights: ExpertWeights, scales: Tensors) -> ExpertTensors:
    """Undo ``_from_mxfp4``."""
    tensors, wide = _biases(config, weights), None
    for name, weight in zip(config.names, weights[:2], strict=True):
        is_gated = name == config.names[0]
        if isinstance(weight, Codes):
            parts = weight.split([weight.shape[0] // config.num_experts] * config.num_experts)
            blocks = torch.stack([mxfp4.to_blocks(part) for part in parts])
            own_scales = torch.stack([part.scales for part in parts])
        else:
            wide, own_scales = weight.dtype, scales[f"{name}_scales"]
            own_scales = _gates_first(own_scales) if is_gated else own_scales
            blocks = torch.stack(list(map(mxfp4.encode, weight, own_scales)))
        if is_gated:
            blocks, own_scales = _interleave(blocks), _interleave(own_scales)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": own_scales}
    return ExpertTensors(tensors, lambda: _from_mxfp4(config, tensors, wide))


def _biases(config: ExpertsConfig, weights: ExpertWeights) -> Tensors:
    """Return the biases as the checkpoint stores them."""
    gate_up, down = config.names
    assert weights.gate_up_bias is not None
    assert weights.down_bias is not None
    return {f"{gate_up}_bias": _interleave(weights.gate_up_bias), f"{down}_bias": weights.down_bias}


def _interleave(tensor: Tensor) -> Tensor:
    """[E, 2 F, ...] with gates first -> [E, 2 F, ...] with gate and up rows alternating."""
    return tensor.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _gates_first(tensor: Tensor) -> Tensor:
    """[E, 2 F, ...] with gate and up rows alternating -> [E, 2 F, ...] with gates first."""
    return tensor.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _from_interleaved(config: ExpertsConfig, tensors: Tensors) -> ExpertWeights:
    """gate_up [E, D, 2 F] has gate and up rows alternating; down [E, F, D]."""
    gate_up, down = (tensors.pop(name).transpose(1, 2) for name in config.names)
    return _with_biases(config, tensors, _gates_first(gate_up).contiguous(), down.contiguous())


def _from_mxfp4(config: ExpertsConfig, tensors: Tensors, wide: torch.dtype | None) -> ExpertWeights:
    """Blocks and scales are uint8. gate_up has gate and up rows alternating. wide: dequantize to this dtype."""
    gate_up, down = (_mxfp4_weight(tensors, name, wide, is_gated=name == config.names[0]) for name in config.names)
    return _with_biases(config, tensors, gate_up, down)


def _with_biases(
    config: ExpertsConfig, tensors: Tensors, gate_up: Tensor | Codes, down: Tensor | Codes
) -> ExpertWeights:
    """Add the biases to gate_up [E, 2 F, D] and down [E, D, F]. Gate and up rows of the loaded biases alternate."""
    gate_up_bias, down_bias = (tensors[f"{name}_bias"] for name in config.names)
    return ExpertWeights(gate_up, down, _gates_first(gate_up_bias).contiguous(), down_bias, gate_function(config))


def _mxfp4_weight(tensors: Tensors, name: str, wide: torch.dtype | None, *, is_gated: bool) -> Tensor | Codes:
    """Return the weight with gates first: codes [E * outputs, inputs], or [E, outputs, inputs] in the dtype ``wide``.

    Converts expert by expert, codes in place, to bound the temporary memory. Scales stay in ``tensors``.
    """
    blocks, scales = tensors.pop(f"{name}_blocks"), tensors[f"{name}_scales"]
    shape = *scales.shape[:2], scales.shape[2] * MXFP4_BLOCK
    weights = None if wide is None else torch.empty(shape, dtype=wide, device=blocks.device)
    for expert in range(len(blocks)):
        own = blocks[expert : expert + 1], scales[expert : expert + 1]
        own_blocks, own_scales = map(_gates_first, own) if is_gated else own
        codes = mxfp4.to_codes(own_blocks[0], own_scales[0])
        if weights is not None:
            weights[expert] = codes.dequantized(weights.dtype)
        else:
            blocks[expert], scales[expert] = codes.packed.view(blocks.shape[1:]), codes.scales
    if weights is not None:
        return weights
    return codes._replace(packed=blocks.flatten(2).flatten(0, 1), scales=scales.flatten(0, 1))


def gate_function(config: ExpertsConfig) -> GateFunction:
    """Return the activation of the experts."""
    return GateFunction(config.limit, config.alpha)


class CodedExperts:
    """The codes [E * O, I] of a matrix, while they are loaded.

    Args:
        names: of the fused parts of an expert, such as gate and up.
        expert: one expert, with its parts.
    """

    def __init__(
        self, linear_format: CodesFormat, names: tuple[str, ...], expert: LinearSpec, num_experts: int
    ) -> None:
        self._format = linear_format
        self._names = names
        self._layer = expert
        self._kept: list[Tensors] = [{} for _ in range(num_experts)]
        self._loaded = [linear_format.empty(expert) for _ in range(num_experts)]

    def targets(self) -> dict[str, Target]:
        """Map tensor names within the MLP to targets."""
        return {
            f"experts.{expert}.{part}.{name}": target
            for expert, tensors in enumerate(self._loaded)
            for name, targets in unplaced_targets(self._format, self._layer, tensors)
            for part, target in zip(self._names, targets, strict=True)
        }

    def assemble(self) -> Codes:
        """Return the codes. Converts expert by expert, and frees the loaded tensors, to bound the memory."""
        joined: Codes | None = None
        for expert in range(len(self._kept)):
            tensors = self._loaded.pop(0)
            codes = self._format.codes(self._layer, tensors)
            if codes.offsets is None:  # depends on the zero points of the expert
                codes = codes._replace(offsets=torch.zeros_like(codes.scales))
            self._kept[expert] = self._format.kept(tensors)
            if joined is None:
                own = (part.new_empty(len(self._kept) * len(part), *part.shape[1:]) for part in _tensors(codes))
                joined = codes._replace(**dict(zip(("packed", "scales", "offsets"), own, strict=True)))
            for own, new in zip(_tensors(joined), _tensors(codes), strict=True):
                own[expert * len(new) : (expert + 1) * len(new)] = new
        assert joined is not None
        assert joined.offsets is not None
        return joined if joined.offsets.any() else joined._replace(offsets=None)

    def open_for_loading(self, codes: Codes) -> None:
        """Restore the loaded tensors from codes [E * O, I]."""
        parts = codes.split([sum(self._layer.sizes)] * len(self._kept))
        self._loaded = [
            kept | self._format.tensors(self._layer, part) for kept, part in zip(self._kept, parts, strict=True)
        ]


class JoinedExperts:
    """The codes [E * O, I] of a matrix whose tensor [E, O, I] is quantized while it is loaded."""

    def __init__(
        self, linear_format: CodesFormat, names: tuple[str, ...], expert: LinearSpec, num_experts: int
    ) -> None:
        """names: of the tensor. expert: one expert."""
        self._format, [self._name] = linear_format, names
        self._shape = num_experts, sum(expert.sizes), expert.in_features
        self._layer = expert._replace(sizes=(num_experts * sum(expert.sizes),))
        self._loaded = linear_format.empty(self._layer)

    def targets(self) -> dict[str, Target]:
        """Map the name of the tensor within the MLP to its target."""
        [writer] = self._format.writers(self._layer, self._loaded)["weight"]
        return {self._name: Target(writer.placeholder.view(self._shape), writer=writer)}

    def assemble(self) -> Codes:
        """Return the codes."""
        codes, self._loaded = self._format.codes(self._layer, self._loaded), {}
        return codes

    def open_for_loading(self, codes: Codes) -> None:
        """Restore the loaded tensors from codes [E * O, I]."""
        self._loaded = self._format.tensors(self._layer, codes)


def _tensors(codes: Codes) -> list[Tensor]:
    """Return the tensors [O, ...] of codes [O, I]."""
    return [own for own in codes[:3] if isinstance(own, torch.Tensor)]
