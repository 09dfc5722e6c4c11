"""The gated MLPs of a mixture of experts: x [T, D], K experts and weights per row [T, K] -> the weighted sum [T, D].

On a CPU the rows of an expert are multiplied together by matmuls whose results do not depend on the number of rows. The
K results of a token are added in the order in which its experts were chosen. So the result of a row does not depend on
the other rows. On a GPU this holds with ``batch_invariant``.

T tokens, D model size, I inner size, E experts, K experts per token, P = T * K (token, expert) pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from aioengine.kernels import linear
from aioengine.kernels.activation import sigmoid, silu_and_mul
from aioengine.kernels.expert_types import ExpertWeights
from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.kernels.expert_types import ChosenExperts, GateFunction, SharedOutputs
    from aioengine.kernels.linear import Matmul


class Experts(Protocol):
    """A callable that computes the experts. It holds their weights."""

    def __call__(self, x: Tensor, chosen: ChosenExperts, shared: SharedOutputs | None = None) -> Tensor:
        """Return [T, D] for x [T, D] and the experts of each row, with ``shared`` added."""
        ...

    def weights(self) -> ExpertWeights:
        """Return the weights in the layout that ``prepare`` takes: on a GPU the same tensors, on a CPU copies."""
        ...

    def update(self, weights: ExpertWeights) -> None:
        """Replace the weights. On a GPU they are copied in place, so that addresses in CUDA graphs stay valid."""
        ...


def activate(gate_up: Tensor, gate: GateFunction) -> Tensor:
    """Apply the gate function: [..., 2 I], gates first -> [..., I]."""
    if not gate.limit:
        return silu_and_mul(gate_up)
    gates, ups = gate_up.chunk(2, dim=-1)
    gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit)
    return (ups + 1) * (gates * sigmoid(gates * gate.alpha))


def add_shared(total: Tensor, shared: SharedOutputs | None) -> Tensor:
    """Add the results of shared experts to total [T, D]."""
    if shared is None:
        return total
    return total + (shared.values if shared.gates is None else sigmoid(shared.gates) * shared.values)


def prepare(weights: ExpertWeights, *, batch_invariant: bool = False) -> Experts:
    """Return the fastest implementation for these experts.

    Args:
        weights: on a CPU they may be copied; the caller can then free them.
        batch_invariant: on a GPU, a row of the result must not depend on the number of rows.

    Raises:
        ValueError: the weights are on a GPU and Triton is not installed.
    """
    if launcher.serves(weights.down):
        return DeviceExperts(weights, batch_invariant=batch_invariant)
    if weights.down.device.type != "cpu":
        raise ValueError("mixture-of-experts models on a GPU need Triton, which is not installed: pip install triton")
    return GroupedExperts(weights)


class DeviceExperts:
    """Experts on a GPU. The kernels read the routing on the device, so the host never waits for it."""

    def __init__(self, weights: ExpertWeights, *, batch_invariant: bool) -> None:
        from aioengine.kernels.triton.experts import compute

        self._weights = weights
        self._batch_invariant = batch_invariant
        self._compute = compute

    def __call__(self, x: Tensor, chosen: ChosenExperts, shared: SharedOutputs | None = None) -> Tensor:
        """Compute the experts: x [T, D] -> [T, D]."""
        return self._compute(x.contiguous(), chosen, self._weights, shared, batch_invariant=self._batch_invariant)

    def weights(self) -> ExpertWeights:
        return self._weights

    def update(self, weights: ExpertWeights) -> None:
        for own, new in zip(self._weights, weights, strict=True):
            if isinstance(own, torch.Tensor) and isinstance(new, torch.Tensor) and own is not new:
                own.copy_(new)


class GroupedExperts:
    """Experts on a CPU, one after the other: all rows of an expert are multiplied together."""

    def __init__(self, weights: ExpertWeights) -> None:
        self.update(weights)

    def update(self, weights: ExpertWeights) -> None:
        gate_up_bias, down_bias = weights.gate_up_bias, weights.down_bias
        gate_ups = [linear.pack(own, has_bias=gate_up_bias is not None) for own in weights.gate_up]
        downs = [linear.pack(own, has_bias=down_bias is not None) for own in weights.down]
        self._gate_up, self._down = _matmuls(gate_ups, gate_up_bias), _matmuls(downs, down_bias)
        self._packed = gate_ups, downs, gate_up_bias, down_bias, weights.gate

    def weights(self) -> ExpertWeights:
        gate_ups, downs, gate_up_bias, down_bias, gate = self._packed
        gate_up, down = (torch.stack([linear.unpack(own) for own in packed]) for packed in (gate_ups, downs))
        return ExpertWeights(gate_up, down, gate_up_bias, down_bias, gate)

    def __call__(self, x: Tensor, chosen: ChosenExperts, shared: SharedOutputs | None = None) -> Tensor:
        """Compute the experts: x [T, D] -> [T, D]."""
        num_tokens, top_k = chosen.experts.shape
        sorted_experts, order = chosen.experts.flatten().sort(stable=True)
        used, counts = sorted_experts.unique_consecutive(return_counts=True)
        parts = x.new_empty((num_tokens * top_k, x.shape[1]))
        gate = self._packed[-1]
        for expert, pairs in zip(used.tolist(), order.split(counts.tolist()), strict=True):
            gate_up = self._gate_up[expert](x.index_select(0, pairs // top_k))
            parts.index_copy_(0, pairs, self._down[expert](activate(gate_up, gate)))
        weighted = parts.view(num_tokens, top_k, -1) * chosen.weights.to(x.dtype).unsqueeze(-1)
        total = weighted[:, 0]
        for index in range(1, top_k):
            total = total + weighted[:, index]
        return add_shared(total, shared)


def _matmuls(packed: list[Tensor], bias: Tensor | None) -> list[Matmul]:
    """Return one matmul per expert, for packed weights [O, I] and bias [E, O]."""
    biases = [None] * len(packed) if bias is None else list(bias)
    return [linear.prepare(own, own_bias) for own, own_bias in zip(packed, biases, strict=True)]
