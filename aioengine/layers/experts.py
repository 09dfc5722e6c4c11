"""Mixtures of experts: a router selects the MLPs of each token.

Shape letters: T tokens, K experts per token, D hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from aioengine.families._block_config import MlpConfig
from aioengine.families._experts import CHOICE_BIAS, ExpertsConfig, SharedConfig
from aioengine.kernels import experts
from aioengine.kernels.codes import Codes
from aioengine.kernels.expert_types import ChosenExperts, ExpertWeights, SharedOutputs
from aioengine.kernels.experts import DeviceExperts, GroupedExperts
from aioengine.kernels.routing import route
from aioengine.layers import expert_tensors
from aioengine.layers.adapters import Grouping
from aioengine.layers.expert_tensors import CodedExperts, ExpertTensors, JoinedExperts
from aioengine.layers.layer import Layer, Placement, Slice, Target, Units, errors_of, rank_ranges
from aioengine.layers.linear import Linear
from aioengine.layers.mlp import MLP
from aioengine.model_files.quantization import Axis
from aioengine.quantization._base import CodesFormat, LinearFormat, LinearSpec, Tensors
from aioengine.quantization.plain import PLAIN, plain


class ExpertRouter(Layer):
    """[T, D] -> the K experts of each token, and their weights."""

    def __init__(self, hidden_size: int, config: ExpertsConfig, placement: Placement) -> None:
        router = self._config = config.router
        self._top_k = config.top_k
        own = replace(placement, format_of=plain)  # checkpoints do not quantize routers
        if router.in_fp32:
            own = replace(own, dtype=torch.float32)
        self._logits = Linear(hidden_size, {router.name: config.num_experts}, own, bias=router.has_bias)
        self.parts = (("", self._logits),)
        self._bias: Tensor | None = None
        if router.has_choice_bias:
            self._bias = torch.empty(config.num_experts, dtype=torch.float32, device=placement.device)

    def own_weights(self) -> dict[str, Target]:
        return {} if self._bias is None else {f"{self._config.name}.{CHOICE_BIAS}": Target(self._bias)}

    def __call__(self, x: Tensor) -> ChosenExperts:
        """x [T, D] -> experts and weights of each token."""
        logits = self._logits(x.float() if self._config.in_fp32 else x)
        return route(logits, self._bias, self._top_k, self._config)


class SharedExpert(Layer):
    """The shared expert: an MLP for all tokens, with a factor per token if it has a gate."""

    def __init__(self, hidden_size: int, config: SharedConfig, placement: Placement) -> None:
        self._mlp = MLP(hidden_size, config.inner_size, MlpConfig(), placement)
        unquantized = replace(placement, format_of=plain)
        self._gate = Linear(hidden_size, {config.gate: 1}, unquantized) if config.gate else None
        self.parts = (f"{config.name}.", self._mlp), ("", self._gate)

    def __call__(self, x: Tensor) -> SharedOutputs:
        """x [T, D] -> [T, D], and the logits of the factors."""
        return SharedOutputs(self._mlp(x), None if self._gate is None else self._gate(x))


class SparseMLP(Layer):
    """The weighted sum of the selected experts, plus the shared expert: [T, D] -> [T, D], the part of a rank."""

    is_adaptable = False

    def __init__(self, hidden_size: int, config: ExpertsConfig, placement: Placement) -> None:
        self._shard = placement.shard
        [inner_range] = rank_ranges([Units(config.inner_size)], placement.shard)
        self._inner_range, self._inner_size = inner_range, config.inner_size
        # This rank has a part of each expert.
        config = msgspec.structs.replace(config, inner_size=inner_range[1] - inner_range[0])
        self._hidden_size, self._config, self._placement = hidden_size, config, placement
        self._router = ExpertRouter(hidden_size, config, placement)
        self._shared = None if config.shared is None else SharedExpert(hidden_size, config.shared, placement)
        # While it is open for loading, ``_tensors`` or ``_coded`` has the weights, then ``_experts`` for the kernels.
        self._is_open = True
        self._name = ""
        self._format: LinearFormat = PLAIN
        self._tensors: ExpertTensors | None = None
        self._coded: tuple[CodedExperts | JoinedExperts, ...] = ()  # gate_up and down, if they are quantized
        self._scales: Tensors = {}  # of dequantized MXFP4 weights, which may be replaced without their scales
        self._experts: DeviceExperts | GroupedExperts | None = None
        self.parts = ("", self._router), ("", self._shared)

    def weights(self, prefix: str = "") -> dict[str, Target]:
        """Map names to targets. The first call allocates them, because the format depends on the names of the experts.

        Raises:
            ValueError: the experts have different formats.
        """
        if self._is_open and self._tensors is None and not self._coded:
            self._allocate(prefix)
        return super().weights(prefix)

    def _allocate(self, prefix: str) -> None:
        config, size, placement = self._config, self._hidden_size, self._placement
        self._name = f"{prefix}experts"
        num_experts, inner = config.num_experts, config.inner_size
        if config.stored == "separate":
            names = [f"experts.{i}.{name}" for i in range(num_experts) for name in config.names]
        else:
            names = [name.removesuffix(".weight") for name in config.names]
        linear_format, *others = [placement.format_of(f"{prefix}{name}") for name in names]
        self._format = linear_format
        if any(other is not linear_format for other in others):
            raise ValueError(f"the experts {self._name} have several formats; allowed: one format for all of them")
        if isinstance(linear_format, CodesFormat) and config.stored in {"separate", "packed"}:
            kind = CodedExperts if config.stored == "separate" else JoinedExperts
            gate_up = LinearSpec(size, (inner, inner), False, placement.dtype, placement.device, allows_order=False)
            down = gate_up._replace(in_features=inner, sizes=(size,), first_input=self._inner_range[0])
            self._coded = (
                kind(linear_format, config.names[:-1], gate_up, num_experts),
                kind(linear_format, config.names[-1:], down, num_experts),
            )
        else:
            self._tensors = expert_tensors.empty(config, size, placement)

    def own_weights(self) -> dict[str, Target]:
        if not self._is_open:
            return {}
        if self._coded:
            targets = self._coded[0].targets() | self._coded[1].targets()
        else:
            assert self._tensors is not None, "weights was not called"
            tensors = self._tensors.tensors
            targets = {name: Target(tensors[name], is_preset=name.endswith("_scales")) for name in tensors}
        if self._shard.size == 1:
            return targets
        return {name: target._replace(source=self._source(name)) for name, target in targets.items()}

    def _source(self, name: str) -> Slice | None:
        """Return the part of a tensor in the checkpoint that this rank loads; None for all of it."""
        if self._config.stored != "separate":
            return expert_tensors.source(self._config, name, self._inner_range, self._inner_size)
        _, _, part, tensor = name.split(".", 3)
        axis: Axis = "outputs"
        shape = self._inner_size, self._hidden_size
        if part == self._config.names[-1]:
            axis, shape = "inputs", (self._hidden_size, self._inner_size)
        with errors_of(self._name):
            own = self._format.part(tensor, axis, (self._inner_range,), shape)
        return None if own is None else Slice(*own)

    def finish_loading(self) -> None:
        super().finish_loading()
        if not self._is_open:
            return
        self._is_open = False
        with errors_of(self._name):
            weights = self._assembled()
        if self._experts is None:
            placement = self._placement
            self._experts = experts.prepare(weights, placement.dtype, batch_invariant=placement.batch_invariant)
        else:
            self._experts.update(weights)

    def _assembled(self) -> ExpertWeights:
        """Return the loaded weights, and free the loaded tensors."""
        if self._coded:
            gate_up, down = (matrix.assemble() for matrix in self._coded)
            return ExpertWeights(gate_up, down, gate=expert_tensors.gate_function(self._config))
        assert self._tensors is not None, "weights was not called"
        down_bias = self._tensors.tensors.get(f"{self._config.names[-1]}_bias")
        if self._shard.rank and down_bias is not None:
            down_bias.zero_()  # only rank 0 adds it to the sum over the ranks
        tensors, weights = self._tensors.tensors, self._tensors.assemble()
        self._tensors = None
        if isinstance(weights.gate_up, Tensor):
            self._scales = {name: tensors[name] for name in tensors if name.endswith("_scales")}
        return weights

    def open_for_loading(self, prefix: str = "", modules: Collection[str] | None = None) -> None:
        super().open_for_loading(prefix, modules)
        stems = [f"{prefix}{name.partition('.')[0]}" for name in ("experts", *self._config.names)]
        if modules is not None and not any(name.startswith((*stems,)) for name in modules):
            return
        assert self._experts is not None, "the layer is open for loading already"
        self._is_open = True
        weights = self._experts.weights()
        if not self._coded:
            self._tensors = expert_tensors.reopened(self._config, weights, self._scales)
        else:
            for matrix, codes in zip(self._coded, (weights.gate_up, weights.down), strict=True):
                assert isinstance(codes, Codes)
                matrix.open_for_loading(codes)

    def free_weights(self) -> None:
        super().free_weights()
        self._experts, self._tensors, self._coded, self._scales = None, None, (), {}
        self._is_open = True

    def __call__(self, x: Tensor, grouping: Grouping | None = None) -> Tensor:
        """[T, D] -> [T, D]. ``grouping`` is unused, because adapters do not change experts."""
        assert self._experts is not None, "finish_loading was not called"
        return self._experts(x, self._router(x), None if self._shared is None else self._shared(x))
