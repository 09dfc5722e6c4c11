"""Fused gate and up projection with SiLU: x [T, I], weight [O, I], bias [O] -> silu(gate) * up [T, O / 2].

The gate lines of the weight come first. It is faster than a matmul with a separate activation: decode of an 8B model on
an H200 yields about 1 % more tokens/s with 1 row, 1.2 % with 8 and 1.7 % with 128; no difference with 32 or 256.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from aioengine.kernels import linear
from aioengine.kernels.activation import activate_and_mul
from aioengine.kernels.row_counts import Matmul
from aioengine.kernels.triton import launcher


def prepare(matmul: Matmul, weight: Tensor, bias: Tensor | None) -> Matmul:
    """Return a callable [T, I] -> [T, O / 2] for weight [O, I] and bias [O]. matmul: their ``linear.prepare``."""

    def separate(x: Tensor) -> Tensor:
        """[T, I] -> [T, O / 2] in two kernels."""
        return activate_and_mul(matmul(x), "silu")

    on_cpu = linear.prepare_gated(weight, bias, partial(activate_and_mul, activation="silu"))
    if on_cpu is not None:
        return on_cpu
    if bias is not None or not _can_fuse(weight):
        return separate
    from aioengine.kernels.triton.gated_linear import compile_specializations, shape_of_programs
    from aioengine.kernels.triton.gated_linear import matmul as gated_matmul
    from aioengine.kernels.triton.invariant_linear import InvariantMatmul, num_splits
    from aioengine.kernels.triton.skinny_linear import gated_vector_matmul

    invariant = matmul if isinstance(matmul, InvariantMatmul) else None
    fallback = separate if invariant is None else invariant.gated
    if invariant is not None and num_splits(*weight.shape) > 1:  # otherwise all kernels add in the same order
        return fallback
    num_outputs, size = weight.shape[0] // 2, weight.shape[1]
    compile_specializations(weight)

    def fused(x: Tensor) -> Tensor:
        """[T, I] -> [T, O / 2], in one kernel if that is faster."""
        if x.shape[0] == 1 and invariant is None:
            return gated_vector_matmul(x, weight)
        programs = shape_of_programs(num_outputs, size, x.shape[0])
        if programs is None or not x.is_contiguous() or x.data_ptr() % 16:
            return fallback(x)
        return gated_matmul(x, weight, programs)

    return fused


def _can_fuse(weight: Tensor) -> bool:
    """Return whether the fused kernel takes weight [O, I]: 16-bit numbers, on a GPU with TMA (Hopper or newer)."""
    if not launcher.supports(weight) or weight.dtype == torch.float32 or not launcher.has_dependent_launch():
        return False
    return weight.is_contiguous() and weight.data_ptr() % 16 == 0
