"""Mixtures of experts: a router chooses the MLPs that a token goes through. T tokens, D model size, E experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from aioengine.families._block_config import MlpConfig
from aioengine.families._experts import CHOICE_BIAS
from aioengine.kernels import experts
from aioengine.kernels.expert_types import Routing, SharedOutputs
from aioengine.kernels.routing import route
from aioengine.layers import expert_tensors
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


class Router:
    """[T, D] -> the K experts of each token and their weights."""

    def __init__(self, hidden_size: int, config: ExpertsConfig, placement: Placement) -> None:
        router = config.router
        self._name, self._is_wide = router.name, router.is_wide
        self._routing = Routing(
            top_k=config.top_k,
            scoring=router.scoring,
            is_normalized=router.is_normalized,
            scale=router.scale,
            num_groups=router.num_groups,
            top_groups=router.top_groups,
            group_top=router.group_top,
        )
        own = replace(placement, dtype=torch.float32) if router.is_wide else placement
        self._logits = Linear(hidden_size, {router.name: config.num_experts}, own, bias=router.has_bias)
        self._bias: Tensor | None = None
        if router.has_choice_bias:
            self._bias = torch.empty(config.num_experts, dtype=torch.float32, device=placement.device)

    def weights(self, prefix: str) -> dict[str, Target]:
        found = self._logits.weights(prefix)
        return found if self._bias is None else {**found, f"{prefix}{self._name}.{CHOICE_BIAS}": Target(self._bias)}

    def finish_loading(self) -> None:
        self._logits.finish_loading()

    def open_for_loading(self) -> None:
        self._logits.open_for_loading()

    def __call__(self, x: Tensor) -> ChosenExperts:
        """x [T, D] -> the experts of each token."""
        return route(self._logits(x.float() if self._is_wide else x), self._bias, self._routing)


class SharedExpert:
    """The MLP that all tokens go through, with a factor of each token where it has a gate."""

    def __init__(self, hidden_size: int, config: SharedConfig, placement: Placement) -> None:
        self._name = config.name
        self._mlp = MLP(hidden_size, config.inner_size, placement, config=MlpConfig())
        self._gate = Linear(hidden_size, {config.gate: 1}, placement) if config.gate else None

    def weights(self, prefix: str) -> dict[str, Target]:
        found = self._mlp.weights(f"{prefix}{self._name}.")
        return found if self._gate is None else found | self._gate.weights(prefix)

    def finish_loading(self) -> None:
        self._mlp.finish_loading()
        if self._gate is not None:
            self._gate.finish_loading()

    def open_for_loading(self) -> None:
        self._mlp.open_for_loading()
        if self._gate is not None:
            self._gate.open_for_loading()

    def __call__(self, x: Tensor) -> SharedOutputs:
        """x [T, D] -> [T, D] and the logits of its factors."""
        return SharedOutputs(self._mlp(x), None if self._gate is None else self._gate(x))


class SparseMLP:
    """The weighted sum of the MLPs that the router chooses, and of a shared one where there is one: [T, D] -> [T, D].

    Adapters do not change it.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig, placement: Placement) -> None:
        self._config = config
        self._batch_invariant = placement.batch_invariant
        self._router = Router(hidden_size, config, placement)
        self._shared = None if config.shared is None else SharedExpert(hidden_size, config.shared, placement)
        self._tensors: ExpertTensors | None = expert_tensors.empty(config, hidden_size, placement)
        self._experts: Experts | None = None

    def weights(self, prefix: str) -> dict[str, Target]:
        """``prefix``: of the MLP."""
        assert self._tensors is not None, "the layer is not open for loading"
        found = self._router.weights(prefix) | self._tensors.weights(prefix)
        return found if self._shared is None else found | self._shared.weights(prefix)

    def finish_loading(self) -> None:
        assert self._tensors is not None, "the layer is not open for loading"
        self._router.finish_loading()
        if self._shared is not None:
            self._shared.finish_loading()
        weights, self._tensors = self._tensors.assemble(), None
        if self._experts is None:
            self._experts = experts.prepare(weights, batch_invariant=self._batch_invariant)
        else:
            self._experts.update(weights)

    def open_for_loading(self) -> None:
        assert self._experts is not None, "the layer is open for loading already"
        self._router.open_for_loading()
        if self._shared is not None:
            self._shared.open_for_loading()
        self._tensors = expert_tensors.reopened(self._config, self._experts.weights())

    def linears(self) -> list[Linear]:
        """Those that adapters may change: none."""
        return []

    def __call__(self, x: Tensor, rows: Grouping | None = None) -> Tensor:
        """[T, D] -> [T, D]. ``rows``: as in ``Linear``; not used."""
        assert self._experts is not None, "finish_loading was not called"
        return self._experts(x, self._router(x), None if self._shared is None else self._shared(x))
