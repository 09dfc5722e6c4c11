"""Norms and activations on a GPU, each in one pass over the memory. T rows, D columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from aioengine.kernels.triton.dependent import start_next_and_wait
from aioengine.kernels.triton.launcher import KernelLauncher, alignments, next_power_of_2, options

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def rms_normed(x: tl.tensor, weight: tl.tensor, num_columns: tl.tensor, epsilon: tl.tensor) -> tl.tensor:
    """Return the RMS norm of a row x [D] times its weight [D]. With an fp32 weight the result is rounded once."""
    wide = x.to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / num_columns + epsilon)
    normed = wide * inverse * weight if weight.dtype == tl.float32 else (wide * inverse).to(x.dtype) * weight
    return normed.to(x.dtype)


@triton.jit
def _norm_kernel(
    delta: tl.tensor, residual: tl.tensor, weight: tl.tensor, out: tl.tensor, row_stride: tl.tensor,
    num_columns: tl.tensor, epsilon: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    scale = tl.load(weight + columns, mask=inside, other=0.0)  # constant, so it need not wait for the previous kernel
    least = tl.load(epsilon)
    start_next_and_wait()
    x = tl.load(residual + row * row_stride + columns, mask=inside, other=0.0)
    if delta is not None:
        x = x + tl.load(delta + row * num_columns + columns, mask=inside, other=0.0)
        tl.store(residual + row * row_stride + columns, x, mask=inside)
    tl.store(out + row * num_columns + columns, rms_normed(x, scale, num_columns, least), mask=inside)


@triton.jit
def _norm_and_add_kernel(
    delta: tl.tensor, residual: tl.tensor, post: tl.tensor, pre: tl.tensor, out: tl.tensor, num_columns: tl.tensor,
    epsilon: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    places = row * num_columns + columns
    first_scale = tl.load(post + columns, mask=inside, other=0.0)
    if pre is not None:
        second_scale = tl.load(pre + columns, mask=inside, other=0.0)
    least = tl.load(epsilon)
    start_next_and_wait()
    added = rms_normed(tl.load(delta + places, mask=inside, other=0.0), first_scale, num_columns, least)
    x = tl.load(residual + places, mask=inside, other=0.0) + added
    tl.store(residual + places, x, mask=inside)
    if pre is not None:
        tl.store(out + places, rms_normed(x, second_scale, num_columns, least), mask=inside)


@triton.jit
def _layer_norm_kernel(
    delta: tl.tensor, residual: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, num_columns: tl.tensor,
    EPSILON: tl.constexpr, KEEPS_SUM: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.zeros_like(scale)
    if bias is not None:
        shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    start_next_and_wait()
    places = row * num_columns + columns
    x = tl.load(residual + places, mask=inside, other=0.0) + tl.load(delta + places, mask=inside, other=0.0)
    if KEEPS_SUM:
        tl.store(residual + places, x, mask=inside)
    wide = x.to(tl.float32)
    wide = tl.where(inside, wide - tl.sum(wide, 0) / num_columns, 0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / num_columns + EPSILON)
    tl.store(out + places, (wide * inverse * scale + shift).to(x.dtype), mask=inside)


@triton.jit
def _silu_of(wide: tl.tensor) -> tl.tensor:
    return wide / (1.0 + tl.exp(-wide))


@triton.jit
def _gelu_of(wide: tl.tensor) -> tl.tensor:
    """GELU with erfc by formula 7.1.26 of Abramowitz and Stegun, error below 1.5e-7. The exact erfc takes longer than
    the memory access.
    """
    z = tl.abs(wide) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * z)
    sum_ = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    tail = 0.5 * sum_ * tl.exp(-z * z)
    return wide * tl.where(wide < 0.0, tail, 1.0 - tail)


@triton.jit
def _gelu_tanh_of(wide: tl.tensor) -> tl.tensor:
    """GELU with the tanh approximation: (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))."""
    inner = 1.5957691216057308 * wide * (1.0 + 0.044715 * wide * wide)
    return wide / (1.0 + tl.exp(-inner))


@triton.jit
def _gated_kernel(
    x: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    start_next_and_wait()
    gate = tl.load(x + row * 2 * size + columns, mask=inside, other=0.0)
    up = tl.load(x + row * 2 * size + size + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    tl.store(out + row * size + columns, ACTIVATION(wide).to(gate.dtype) * up, mask=inside)


@triton.jit
def _gelu_kernel(x: tl.tensor, out: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    start_next_and_wait()
    loaded = tl.load(x + places, mask=inside, other=0.0)
    tl.store(out + places, _gelu_of(loaded.to(tl.float32)).to(loaded.dtype), mask=inside)


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


_norm = KernelLauncher(_norm_kernel)
_norm_and_add = KernelLauncher(_norm_and_add_kernel)
_layer_norm = KernelLauncher(_layer_norm_kernel)
_gated = KernelLauncher(_gated_kernel)
_gelu = KernelLauncher(_gelu_kernel)


def add_rms_norm(delta: Tensor | None, residual: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """Add delta, if there is one, to the residual [T, D] in place, and return the norm.

    With an fp32 weight the result is rounded once.
    """
    num_rows, num_columns = residual.shape
    out = torch.empty((num_rows, num_columns), dtype=residual.dtype, device=residual.device)
    stride, block = residual.stride(0), next_power_of_2(num_columns)
    arguments = (delta, residual, weight, out, stride, num_columns, epsilon, block)
    key = (residual.dtype, weight.dtype, num_columns, stride, delta is None, residual.data_ptr() % 16)
    _norm((num_rows, 1, 1), key, arguments, options(_num_warps(block)))
    return out


def norm_and_add(delta: Tensor, residual: Tensor, post: Tensor, pre: Tensor | None, *, epsilon: Tensor) -> Tensor:
    """See ``kernels.norms.norm_and_add``: contiguous delta and residual [T, D], weights post and pre [D] -> [T, D]."""
    num_rows, num_columns = residual.shape
    out = residual if pre is None else torch.empty_like(residual)
    block = next_power_of_2(num_columns)
    arguments = (delta, residual, post, pre, out, num_columns, epsilon, block)
    key = (residual.dtype, post.dtype, num_columns, pre is None, *alignments(delta, residual))
    _norm_and_add((num_rows, 1, 1), key, arguments, options(_num_warps(block)))
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
    _layer_norm((num_rows, 1, 1), key, arguments, options(_num_warps(block)))
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2 I], gates first, contiguous -> silu(gate) * up [T, I]."""
    return _activate_and_mul(x, _silu_of)


def gelu(x: Tensor) -> Tensor:
    """Return the exact GELU of contiguous x [...]."""
    out = torch.empty_like(x)
    size, block = x.numel(), 2048
    key = (x.dtype, size % 16 == 0, size >= 1 << 31, x.data_ptr() % 16)
    _gelu((-(-size // block), 1, 1), key, (x, out, size, block), options(4))
    return out


def gelu_and_mul(x: Tensor, *, approximate: str) -> Tensor:
    """x [T, 2 I], gates first, contiguous -> gelu(gate) * up [T, I]. approximate: as in ``kernels.activation.gelu``."""
    return _activate_and_mul(x, _gelu_tanh_of if approximate == "tanh" else _gelu_of)


def _activate_and_mul(x: Tensor, activation: object) -> Tensor:
    """x [T, 2 I], gates first, contiguous -> activation(gate) * up [T, I]. activation: a Triton function."""
    num_rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    block = min(next_power_of_2(size), 1024)
    arguments = (x, out, size, activation, block)
    _gated((num_rows, -(-size // block), 1), (x.dtype, size, activation, x.data_ptr() % 16), arguments, options(4))
    return out
