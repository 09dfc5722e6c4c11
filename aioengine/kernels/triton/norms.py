"""Norms on a GPU, each in one pass over the memory. A program has a whole row, whose sums depend only on D. T rows, D
columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.triton.dependent import wait_between_products
from aioengine.kernels.triton.launcher import alignments, dtypes, kernel, next_power_of_2, options


@triton.jit
def rms_normed(x: tl.tensor, weight: tl.tensor, num_columns: tl.tensor, eps: tl.tensor) -> tl.tensor:
    """Return the RMS norm of a row x [D] times its weight [D]. With an fp32 weight the result is rounded once."""
    wide = x.to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / num_columns + eps)
    normed = wide * inverse * weight if weight.dtype == tl.float32 else (wide * inverse).to(x.dtype) * weight
    return normed.to(x.dtype)


@kernel()
def _norm_kernel(
    delta: tl.tensor, residual: tl.tensor, post: tl.tensor, weight: tl.tensor, out: tl.tensor, row_stride: tl.tensor,
    num_columns: tl.tensor, epsilon: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ``add_rms_norm`` for one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < num_columns
    if post is not None:  # weights do not depend on the previous kernel
        post_scale = tl.load(post + columns, mask=mask, other=0.0)
    if weight is not None:
        scale = tl.load(weight + columns, mask=mask, other=0.0)
    eps = tl.load(epsilon)
    wait_between_products()
    x = tl.load(residual + row * row_stride + columns, mask=mask, other=0.0)
    if delta is not None:
        added = tl.load(delta + row * num_columns + columns, mask=mask, other=0.0)
        if post is not None:
            added = rms_normed(added, post_scale, num_columns, eps)
        x = x + added
        tl.store(residual + row * row_stride + columns, x, mask=mask)
    if weight is not None:
        tl.store(out + row * num_columns + columns, rms_normed(x, scale, num_columns, eps), mask=mask)


@kernel()
def _layer_norm_kernel(
    delta: tl.tensor, residual: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, num_columns: tl.tensor,
    EPSILON: tl.constexpr, KEEPS_SUM: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ``add_layer_norm`` for one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < num_columns
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    shift = tl.zeros_like(scale)
    if bias is not None:
        shift = tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    wait_between_products()
    offsets = row * num_columns + columns
    x = tl.load(residual + offsets, mask=mask, other=0.0) + tl.load(delta + offsets, mask=mask, other=0.0)
    if KEEPS_SUM:
        tl.store(residual + offsets, x, mask=mask)
    wide = x.to(tl.float32)
    wide = tl.where(mask, wide - tl.sum(wide, 0) / num_columns, 0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / num_columns + EPSILON)
    tl.store(out + offsets, (wide * inverse * scale + shift).to(x.dtype), mask=mask)


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


def add_rms_norm(
    delta: Tensor | None, residual: Tensor, weight: Tensor | None, epsilon: Tensor, *, post: Tensor | None = None
) -> Tensor:
    """Add delta, or its norm if there is a weight ``post``, to the residual [T, D] in place, and return the norm of the
    sum. None: no delta; no weight: the residual itself is returned.

    With fp32 weights the result is rounded once.
    """
    num_rows, num_columns = residual.shape
    out = residual
    if weight is not None:
        out = torch.empty((num_rows, num_columns), dtype=residual.dtype, device=residual.device)
    stride, block = residual.stride(0), next_power_of_2(num_columns)
    arguments = (delta, residual, post, weight, out, stride, num_columns, epsilon, block)
    key = (*dtypes(residual, weight, post), num_columns, stride, *alignments(delta, residual))
    _norm_kernel((num_rows, 1, 1), key, arguments, options(_num_warps(block)))
    return out


def add_layer_norm(
    delta: Tensor, residual: Tensor, *, weight: Tensor, bias: Tensor | None, epsilon: float, keeps_sum: bool
) -> Tensor:
    """Return the norm of delta + residual, contiguous [T, D]. keeps_sum: store the sum in the residual."""
    out = torch.empty_like(residual)
    num_rows, num_columns = residual.shape
    block = next_power_of_2(num_columns)
    arguments = (delta, residual, weight, bias, out, num_columns, epsilon, keeps_sum, block)
    key = (residual.dtype, num_columns, epsilon, bias is None, keeps_sum, *alignments(delta, residual))
    _layer_norm_kernel((num_rows, 1, 1), key, arguments, options(_num_warps(block)))
    return out
