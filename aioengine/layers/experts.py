"""Mixtures of experts: a router selects the MLPs of each token.

Shape letters: T tokens, K experts per token, D hidden size, E experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from aioengine.families._block_config import MlpConfig
from aioengine.families._experts import CHOICE_BIAS
from aioengine.kernels import experts
from aioengine.kernels.expert_types import SharedOutputs
from aioengine.kernels.routing import route
from aioengine.layers import expert_tensors
from aioengine.layers.layer import Layer
from aioengine.layers.linear import Linear
from aioengine.layers.mlp import MLP
from aioengine.layers.placement import Target

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.families._experts import ExpertsConfig, SharedConfig
    from aioengine.kernels.expert_types import ChosenExperts
    from aioengine.kernels.experts import Experts
    from aioengine.layers.adapters import Grouping
    from aioengine.layers.expert_tensors import ExpertTensors
    from aioengine.layers.placement import Placement


class ExpertRouter(Layer):
    """[T, D] -> the K experts of each token, and their weights."""

    def __init__(self, hidden_size: int, config: ExpertsConfig, placement: Placement) -> None:
        router = self._config = config.router
        self._top_k = config.top_k
        own = replace(placement, dtype=torch.float32) if router.in_fp32 else placement
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
        self._mlp = MLP(hidden_size, config.inner_size, placement, config=MlpConfig())
        self._gate = Linear(hidden_size, {config.gate: 1}, placement) if config.gate else None
        self.parts = (f"{config.name}.", self._mlp), ("", self._gate)

    def __call__(self, x: Tensor) -> SharedOutputs:
        """x [T, D] -> [T, D], and the logits of the factors."""
        return SharedOutputs(self._mlp(x), None if self._gate is None else self._gate(x))


class SparseMLP(Layer):
    """The weighted sum of the selected experts, plus the shared expert: [T, D] -> [T, D]."""

    is_adaptable = False

    def __init__(self, hidden_size: int, config: ExpertsConfig, placement: Placement) -> None:
        self._config = config
        self._dtype, self._batch_invariant = placement.dtype, placement.batch_invariant
        self._router = ExpertRouter(hidden_size, config, placement)
        self._shared = None if config.shared is None else SharedExpert(hidden_size, config.shared, placement)
        # Open for loading: ``_tensors`` is set. Otherwise ``_experts`` has the weights for the kernels.
        self._tensors: ExpertTensors | None = expert_tensors.empty(config, hidden_size, placement)
        self._experts: Experts | None = None
        self.parts = ("", self._router), ("", self._shared)

    def own_weights(self) -> dict[str, Target]:
        assert self._tensors is not None, "the layer is not open for loading"
        return {name: Target(tensor) for name, tensor in self._tensors.tensors.items()}

    def finish_loading(self) -> None:
        assert self._tensors is not None, "the layer is not open for loading"
        super().finish_loading()
        weights, self._tensors = self._tensors.assemble(), None
        if self._experts is None:
            self._experts = experts.prepare(weights, self._dtype, batch_invariant=self._batch_invariant)
        else:
            self._experts.update(weights)

    def open_for_loading(self) -> None:
        assert self._experts is not None, "the layer is open for loading already"
        super().open_for_loading()
        self._tensors = expert_tensors.reopened(self._config, self._experts.weights())

    def __call__(self, x: Tensor, rows: Grouping | None = None) -> Tensor:
        """[T, D] -> [T, D]. ``rows`` is unused, since adapters do not change experts."""
        assert self._experts is not None, "finish_loading was not called"
        return self._experts(x, self._router(x), None if self._shared is None else self._shared(x))
