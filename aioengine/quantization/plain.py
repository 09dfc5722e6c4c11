"""Weights that are not quantized: weight [O, I] and bias [O] in the dtype of the activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aioengine.kernels import gated_linear, linear
from aioengine.quantization._base import LinearFormat, LinearSpec, PreparedLinear, Tensors


class PlainFormat(LinearFormat):
    """On a CPU the weight may be converted to a library's layout (``linear.pack``). The plain one is then dropped."""

    reorders = False

    def empty(self, layer: LinearSpec) -> Tensors:
        shape = sum(layer.sizes), layer.in_features
        return {"weight": torch.empty(shape, dtype=layer.dtype, device=layer.device), **layer.empty_bias()}

    def split(self, layer: LinearSpec, name: str, tensor: Tensor) -> Sequence[Tensor]:
        """Views [size, ...] of weight [O, I] or bias [O]."""
        return tensor.split(layer.sizes)

    def prepare(self, layer: LinearSpec, tensors: Tensors) -> PreparedLinear:
        bias = tensors.get("bias")
        weight = linear.pack(tensors["weight"], has_bias=bias is not None)
        matmul = linear.prepare(weight, bias, batch_invariant=layer.batch_invariant)
        gated = gated_linear.prepare(matmul, tensors["weight"], bias) if layer.is_gated else None
        others = {} if bias is None else {"bias": bias}
        update = None if linear.uses_onednn(layer.dtype, layer.device) else _keep
        return PreparedLinear(matmul, lambda: {"weight": linear.unpack(weight), **others}, update, gated)


def _keep(tensors: Tensors) -> None:
    """Do nothing, because the matmul reads these tensors."""


PLAIN = PlainFormat()


def plain(name: str) -> PlainFormat:
    """Return the format of the linear layer ``name`` in a checkpoint without quantized layers."""
    return PLAIN
