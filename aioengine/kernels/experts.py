"""The gated MLPs of a mixture of experts: x [T, D], K experts and weights per row [T, K] -> the weighted sum [T, D].

On a CPU the rows of an expert are multiplied together by matmuls whose results do not depend on the number of rows. The
K results of a token are added in the order in which its experts were chosen. So the result of a row does not depend on
the other rows. On a GPU this holds with ``batch_invariant``.

T tokens, D hidden size, F inner size, E experts, K experts per token, P = T * K (token, expert) pairs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aioengine.kernels import code_linear, linear
from aioengine.kernels.activation import activate_and_mul, sigmoid
from aioengine.kernels.codes import Codes, copy_in_place
from aioengine.kernels.expert_types import ChosenExperts, ExpertWeights, GateFunction, SharedOutputs
from aioengine.kernels.linear import PreparedMatmul
from aioengine.kernels.triton import launcher

if TYPE_CHECKING:
    from aioengine.kernels.triton.expert_codes import DeviceWeights


def activate(gate_up: Tensor, gate: GateFunction) -> Tensor:
    """Apply the gate function: [..., 2 F], gates first -> [..., F]."""
    if not gate.limit:
        return activate_and_mul(gate_up, "silu")
    gates, ups = gate_up.chunk(2, dim=-1)
    gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit)
    return (ups + 1) * (gates * sigmoid(gates * gate.alpha))


def add_shared(total: Tensor, shared: SharedOutputs | None) -> Tensor:
    """Add the results of shared experts to total [T, D]."""
    if shared is None:
        return total
    return total + (shared.values if shared.gates is None else sigmoid(shared.gates) * shared.values)


def prepare(
    weights: ExpertWeights, dtype: torch.dtype, *, batch_invariant: bool = False
) -> DeviceExperts | GroupedExperts:
    """Return the fastest implementation for these experts.

    Args:
        weights: on a CPU the result may have copies of them, so the caller should keep no reference.
        dtype: of x.
        batch_invariant: on a GPU, a row of the result must not depend on the number of rows.
    """
    down = weights.down.packed if isinstance(weights.down, Codes) else weights.down
    if launcher.supports(down):
        return DeviceExperts(weights, batch_invariant=batch_invariant)
    return GroupedExperts(weights, dtype)


class DeviceExperts:
    """Experts on a GPU. The kernels read the routing on the device, so the host never waits for it."""

    def __init__(self, weights: ExpertWeights, *, batch_invariant: bool) -> None:
        from aioengine.kernels.triton import expert_codes, experts

        self._compute, self._codes = experts.compute, expert_codes
        self._weights = expert_codes.device_weights(weights)
        self._batch_invariant = batch_invariant

    def __call__(self, x: Tensor, chosen: ChosenExperts, shared: SharedOutputs | None = None) -> Tensor:
        """Return [T, D] for x [T, D] and the experts of each row, with ``shared`` added."""
        invariant = self._batch_invariant
        return self._compute(x.contiguous(), chosen, self._weights, shared, batch_invariant=invariant)

    def weights(self) -> ExpertWeights:
        """Return the weights in the layout that ``prepare`` takes: the same tensors."""
        return self._codes.restored(self._weights)

    def update(self, weights: ExpertWeights) -> None:
        """Replace the weights in place, so that addresses in CUDA graphs stay valid."""
        copy_in_place(_flat(self._weights), _flat(self._codes.device_weights(weights)))


def _flat(weights: DeviceWeights) -> list[object]:
    return [part for value in weights for part in (value if isinstance(value, tuple) else (value,))]


class GroupedExperts:
    """Experts on a CPU, one after the other: all rows of an expert are multiplied together."""

    def __init__(self, weights: ExpertWeights, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.update(weights)

    def update(self, weights: ExpertWeights) -> None:
        self._gate_up = self._prepared(weights.gate_up, weights.gate_up_bias, weights.num_experts)
        self._down = self._prepared(weights.down, weights.down_bias, weights.num_experts)
        self._biases, self._gate = (weights.gate_up_bias, weights.down_bias), weights.gate

    def _prepared(
        self, weight: Tensor | Codes, bias: Tensor | None, num_experts: int
    ) -> list[PreparedMatmul[Codes]] | list[PreparedMatmul[Tensor]]:
        """Return the matmul of each expert. bias: [E, O]."""
        biases = [None] * num_experts if bias is None else list(bias)
        if isinstance(weight, Codes):
            parts = weight.split([weight.shape[0] // num_experts] * num_experts)
            return [code_linear.prepare(part, own, self._dtype) for part, own in zip(parts, biases, strict=True)]
        packed = [linear.pack(own, has_bias=bias is not None) for own in weight]
        return [
            PreparedMatmul(linear.prepare(part, own), partial(linear.unpack, part))
            for part, own in zip(packed, biases, strict=True)
        ]

    def weights(self) -> ExpertWeights:
        """Return copies of the weights in the layout that ``prepare`` takes."""
        gate_up, down = (_joined([matmul.restore() for matmul in own]) for own in (self._gate_up, self._down))
        return ExpertWeights(gate_up, down, *self._biases, self._gate)

    def __call__(self, x: Tensor, chosen: ChosenExperts, shared: SharedOutputs | None = None) -> Tensor:
        """Return [T, D] for x [T, D] and the experts of each row, with ``shared`` added."""
        num_tokens, top_k = chosen.experts.shape
        sorted_experts, order = chosen.experts.flatten().sort(stable=True)
        used, counts = sorted_experts.unique_consecutive(return_counts=True)
        parts = x.new_empty((num_tokens * top_k, x.shape[1]))
        for expert, pairs in zip(used.tolist(), order.split(counts.tolist()), strict=True):
            gate_up = self._gate_up[expert].matmul(x.index_select(0, pairs // top_k))
            parts.index_copy_(0, pairs, self._down[expert].matmul(activate(gate_up, self._gate)))
        weighted = parts.view(num_tokens, top_k, -1) * chosen.weights.to(x.dtype).unsqueeze(-1)
        total = weighted[:, 0]
        for index in range(1, top_k):
            total = total + weighted[:, index]
        return add_shared(total, shared)


def _joined(parts: list[Tensor | Codes]) -> Tensor | Codes:
    """Undo the split into experts: weights [O, I] -> [E, O, I], or codes [O, I] -> [E * O, I]."""
    codes = [part for part in parts if isinstance(part, Codes)]
    if not codes:
        return torch.stack([part for part in parts if isinstance(part, torch.Tensor)])
    return Codes.joined(codes)
