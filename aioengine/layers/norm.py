"""Norms.

Shape letters: T tokens, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from aioengine.families._block_config import NormConfig
from aioengine.kernels.norms import add_layer_norm, add_rms_norm, norm_and_add, rms_norm
from aioengine.layers.layer import Layer, Placement, Target
from aioengine.layers.ranks import RankGroup


class RMSNorm(Layer):
    """Root mean square norm: [..., D] -> [..., D]."""

    def __init__(
        self,
        size: int,
        epsilon: float,
        placement: Placement,
        *,
        scales_in_fp32: bool = False,
        offset: float = 0.0,
        order: Tensor | None = None,
    ) -> None:
        """
        Args:
            scales_in_fp32: multiply by the weight in fp32, and round once.
            offset: added to the loaded weight. A norm with an offset always scales in fp32.
            order: [D] int64, the index in the checkpoint of each entry of the weight; None if the orders are equal.
        """
        dtype = torch.float32 if scales_in_fp32 or offset else placement.dtype
        self.weight = torch.empty(size, dtype=dtype, device=placement.device)
        self.epsilon = torch.tensor(epsilon, dtype=torch.float32, device=placement.device)
        self._offset, self._order = offset, order
        self._loaded = torch.empty_like(self.weight) if offset or order is not None else self.weight

    def own_weights(self) -> dict[str, Target]:
        return {"weight": Target(self._loaded)}

    def finish_loading(self) -> None:
        if self._loaded is not self.weight:
            ordered = self._loaded if self._order is None else self._loaded.index_select(0, self._order)
            torch.add(ordered, self._offset, out=self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return rms_norm(x, self.weight, self.epsilon)

    def of_sum(self, delta: Tensor, residual: Tensor) -> Tensor:
        """Add ``delta`` [T, D] to ``residual`` [T, D] in place, and return the norm of the sum: [T, D]."""
        return add_rms_norm(delta, residual, self.weight, self.epsilon)


class LayerNorm(Layer):
    """Layer norm: [..., D] -> [..., D]."""

    def __init__(self, size: int, epsilon: float, placement: Placement, *, bias: bool, has_weight: bool = True) -> None:
        self._has_weight = has_weight
        self._weight = placement.empty(size).fill_(1.0)
        self._bias = placement.empty(size) if bias else None
        self._epsilon = epsilon

    def own_weights(self) -> dict[str, Target]:
        targets = {"weight": Target(self._weight)} if self._has_weight else {}
        return targets if self._bias is None else {**targets, "bias": Target(self._bias)}

    def __call__(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return functional.layer_norm(x, self._weight.shape, self._weight, self._bias, self._epsilon)

    def of_sum(self, delta: Tensor, residual: Tensor, *, keeps_sum: bool = True) -> Tensor:
        """Return the norm of ``delta`` + ``residual``: [T, D]. ``keeps_sum``: store the sum in ``residual``."""
        return add_layer_norm(
            delta, residual, weight=self._weight, bias=self._bias, epsilon=self._epsilon, keeps_sum=keeps_sum
        )


Norm = RMSNorm | LayerNorm


def make_norm(config: NormConfig, size: int, epsilon: float, placement: Placement) -> Norm:
    """Return the norm that ``config`` describes. ``size``: D."""
    if config.kind == "layer":
        return LayerNorm(size, epsilon, placement, bias=config.has_bias, has_weight=config.has_weight)
    return RMSNorm(size, epsilon, placement, scales_in_fp32=config.scales_in_fp32, offset=config.offset)


def add_to_stream(
    delta: Tensor, residual: Tensor, output_norm: Norm | None, input_norm: Norm | None, ranks: RankGroup | None = None
) -> Tensor:
    """Add ``delta`` [T, D] to ``residual`` [T, D] in place, and return the input of the next layer: [T, D].

    Args:
        output_norm: the norm of ``delta``; None to add it unchanged.
        input_norm: the norm of the sum, for the next layer; None if that reads the sum itself.
        ranks: ``delta`` is a part, and is summed over these ranks first; None if it is complete.
    """
    if ranks is not None:
        if output_norm is None and isinstance(input_norm, RMSNorm):
            return ranks.add_rms_norm(delta, residual, input_norm.weight, input_norm.epsilon)
        delta = ranks.all_reduce(delta)
    if output_norm is None:
        return residual.add_(delta) if input_norm is None else input_norm.of_sum(delta, residual)
    if isinstance(output_norm, RMSNorm) and input_norm is None:
        return norm_and_add(delta, residual, output_norm.weight, None, epsilon=output_norm.epsilon)
    if isinstance(output_norm, RMSNorm) and isinstance(input_norm, RMSNorm):
        return norm_and_add(delta, residual, output_norm.weight, input_norm.weight, epsilon=output_norm.epsilon)
    return add_to_stream(output_norm(delta), residual, None, input_norm)
