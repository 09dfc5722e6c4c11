"""Mixtures of experts: a router chooses the MLPs that a token goes through. T tokens, D model size, E experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from aioengine.families._experts import CHOICE_BIAS
from aioengine.kernels import experts
from aioengine.kernels.routing import Routing, route
from aioengine.layers import expert_tensors
from aioengine.layers.linear import Linear
from aioengine.layers.mlp import GatedMLP
from aioengine.layers.placement import Target

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.families._experts import ExpertsConfig
    from aioengine.kernels.experts import Experts
    from aioengine.layers.adapters import Grouping
    from aioengine.layers.expert_tensors import ExpertTensors
    from aioengine.layers.placement import Placement


class Router:
    """[T, D] -> the experts [T, K] of each token, int32, and their weights [T, K], fp32."""

    def __init__(self, hidden_size: int, config: ExpertsConfig, placement: Placement) -> None:
        self._name = config.router
        self._is_wide = config.is_router_wide
        self._routing = Routing(
            top_k=config.top_k,
            scoring=config.scoring,
            is_normalized=config.is_normalized,
            scale=config.scale,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            group_top=config.group_top,
        )
        own = replace(placement, dtype=torch.float32) if self._is_wide else placement
        self._logits = Linear(hidden_size, {config.router: config.num_experts}, own, bias=config.router_bias)
        self._bias: Tensor | None = None
        if config.choice_bias:
            self._bias = torch.empty(config.num_experts, dtype=torch.float32, device=placement.device)

    def weights(self, prefix: str) -> dict[str, Target]:
        found = self._logits.weights(prefix)
        return found if self._bias is None else {**found, f"{prefix}{self._name}.{CHOICE_BIAS}": Target(self._bias)}

    def finish_loading(self) -> None:
        self._logits.finish_loading()

    def open_for_loading(self) -> None:
        self._logits.open_for_loading()

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D] -> [T, K] and [T, K]."""
        return route(self._logits(x.float() if self._is_wide else x), self._bias, self._routing)


class SharedExpert:
    """The MLP that all tokens go through, with a factor of each token where it has a gate."""

    def __init__(self, hidden_size: int, config: ExpertsConfig, placement: Placement) -> None:
        self._name = config.shared
        self._mlp = GatedMLP(hidden_size, config.shared_size, placement, bias=False)
        self._gate = Linear(hidden_size, {config.shared_gate: 1}, placement) if config.shared_gate else None

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

    def __call__(self, x: Tensor) -> experts.Shared:
        """x [T, D] -> [T, D] and the logits of its factors."""
        return experts.Shared(self._mlp(x), None if self._gate is None else self._gate(x))


class SparseMLP:
    """The weighted sum of the MLPs that the router chooses, and of a shared one where there is one: [T, D] -> [T, D].

    Adapters do not change it.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig, placement: Placement) -> None:
        self._config = config
        self._batch_invariant = placement.batch_invariant
        self._router = Router(hidden_size, config, placement)
        self._shared = SharedExpert(hidden_size, config, placement) if config.shared_size else None
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
        chosen, weights = self._router(x)
        return self._experts(x, chosen, weights, None if self._shared is None else self._shared(x))
