"""Activations on a GPU: x [T, 2 F], gates first -> activation(gates) * ups [T, F], and the exact GELU x [...] -> [...].

They are computed in fp32 and rounded like separate operations. A program computes a block of one row, or of the GELU.
Other kernels use the functions of this file too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.triton.dependent import start_next_and_wait, wait_between_products
from aioengine.kernels.triton.launcher import kernel, next_power_of_2, options


@triton.jit
def silu_of(wide: tl.tensor) -> tl.tensor:
    """Return silu of fp32 numbers [...]."""
    return wide / (1.0 + tl.exp(-wide))


@triton.jit
def activated(gate: tl.tensor, up: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Return silu(gate) * up of fp32 sums [...]. Rounds like a separate matmul and activation."""
    return silu_of(gate.to(DTYPE).to(tl.float32)).to(DTYPE) * up.to(DTYPE)


@triton.jit
def softplus_of(wide: tl.tensor) -> tl.tensor:
    """Return softplus of fp32 numbers [...], as ``kernels.activation``."""
    return tl.where(wide > 20.0, wide, tl.log(1.0 + tl.exp(tl.minimum(wide, 20.0))))


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


@kernel()
def _gated_kernel(x: tl.tensor, out: tl.tensor, size: tl.tensor, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Compute ``activate_and_mul`` for a block of a row. ACTIVATION: a function above."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    wait_between_products()
    gate = tl.load(x + row * 2 * size + columns, mask=mask, other=0.0)
    up = tl.load(x + row * 2 * size + size + columns, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    tl.store(out + row * size + columns, ACTIVATION(wide).to(gate.dtype) * up, mask=mask)


@kernel()
def _gelu_kernel(x: tl.tensor, out: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Compute a block of ``gelu``."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    start_next_and_wait()
    loaded = tl.load(x + offsets, mask=mask, other=0.0)
    tl.store(out + offsets, _gelu_of(loaded.to(tl.float32)).to(loaded.dtype), mask=mask)


def gelu(x: Tensor) -> Tensor:
    """Return the exact GELU of contiguous x [...]."""
    out = torch.empty_like(x)
    size, block = x.numel(), 2048
    key = (x.dtype, size % 16 == 0, size >= 1 << 31, x.data_ptr() % 16)
    _gelu_kernel((-(-size // block), 1, 1), key, (x, out, size, block), options(4))
    return out


ACTIVATIONS = {"silu": silu_of, "gelu": _gelu_of, "gelu_tanh": _gelu_tanh_of}


def activate_and_mul(x: Tensor, name: str) -> Tensor:
    """x [T, 2 F], gates first, contiguous -> activation(gate) * up [T, F]. name: one of ``ACTIVATIONS``."""
    activation = ACTIVATIONS[name]
    num_rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    block = min(next_power_of_2(size), 1024)
    key = x.dtype, size, activation, x.data_ptr() % 16
    _gated_kernel((num_rows, -(-size // block), 1), key, (x, out, size, activation, block), options(4))
    return out
