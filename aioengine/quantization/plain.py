"""Weights that are not quantized: weight [O, D] and bias [O] in the dtype of the activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aioengine.kernels import gated_linear, linear
from aioengine.quantization._base import Prepared, Tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from aioengine.quantization._base import Axis


class PlainFormat:
    """Implements ``LinearFormat``. On a CPU the weight is packed for oneDNN, and the unpacked one is dropped."""

    def empty(
        self, in_features: int, sizes: Sequence[int], *, has_bias: bool, dtype: torch.dtype, device: torch.device
    ) -> Tensors:
        out_features = sum(sizes)
        tensors = {"weight": torch.empty(out_features, in_features, dtype=dtype, device=device)}
        if has_bias:
            tensors["bias"] = torch.empty(out_features, dtype=dtype, device=device)
        return tensors

    def split(self, name: str, tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Views [size, ...] of weight [O, D] or bias [O]."""
        return tensor.split(list(sizes))

    def dim_of(self, name: str, axis: Axis) -> int | None:
        if axis == "outputs":
            return 0
        return 1 if name == "weight" else None

    def prepare(self, tensors: Tensors, *, is_gated: bool, batch_invariant: bool) -> Prepared:
        bias = tensors.get("bias")
        weight = linear.pack(tensors["weight"], has_bias=bias is not None)
        prepare = gated_linear.prepare if is_gated else linear.prepare
        return Prepared(prepare(weight, bias, batch_invariant=batch_invariant), {**tensors, "weight": weight})

    def restore(self, tensors: Tensors) -> Tensors:
        return {**tensors, "weight": linear.unpack(tensors["weight"])}


PLAIN = PlainFormat()


def plain(name: str) -> PlainFormat:
    """Return the format of the linear layer ``name`` in a checkpoint without quantized layers."""
    return PLAIN
