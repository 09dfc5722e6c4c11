"""The gated delta rule token after token, with a part of the state matrix in registers; and the gated norm.

If blocks of tokens are allowed, rows with many tokens are computed by ``delta_blocks``.

T packed tokens, C channels, H value heads, G key heads, K and V sizes of a head, N slots, R rows.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from aioengine.kernels.triton import delta_blocks
from aioengine.kernels.triton.causal_conv import rows_key, span_of
from aioengine.kernels.triton.launcher import KernelLauncher, alignments, next_power_of_2

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.kernels.state_types import DeltaGates, StateRows

_VALUES = 16
"""State matrix columns per program: with one warp a sum over keys needs no shared memory."""
HEADS = tl.constexpr(8)
"""Heads per program of the norm."""


@triton.jit
def _unit(x: tl.tensor) -> tl.tensor:
    return x / tl.sqrt_rn(tl.sum(x * x, 0) + delta_blocks.EPSILON)


@triton.jit
def _scan_kernel(
    channels: tl.tensor, steps: tl.tensor, scores: tl.tensor, log_rates: tl.tensor, biases: tl.tensor, state: tl.tensor,
    slots: tl.tensor, starts: tl.tensor, ends: tl.tensor, out: tl.tensor, num_channels: tl.tensor,
    gate_stride: tl.tensor, num_heads: tl.tensor, scale: tl.tensor,
    GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    MOST: tl.constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(2)
    keys = tl.arange(0, BLOCK_K)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = keys < KEYS, values < VALUES
    inside = is_key[:, None] & is_value[None, :]
    begin, count = span_of(ends, row)
    end = begin + count
    if (count > MOST) | (count == 0):
        return
    places, matrix = delta_blocks.load_matrix(
        *(state, slots, starts, row, num_heads, head),
        *(keys, values, is_value, KEYS, VALUES),
    )
    rate, bias = tl.load(log_rates + head), tl.load(biases + head)
    key_head = head // GROUP
    first_key = num_heads // GROUP * KEYS
    for token in range(begin, end):
        at = channels + token * num_channels
        q = tl.load(at + key_head * KEYS + keys, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(at + first_key + key_head * KEYS + keys, mask=is_key, other=0.0).to(tl.float32)
        v = tl.load(at + 2 * first_key + head * VALUES + values, mask=is_value, other=0.0).to(tl.float32)
        decay, beta = delta_blocks.load_gates(steps, scores, token * gate_stride + head, token < end, rate, bias)
        matrix *= tl.exp(decay)
        q = _unit(q) * scale
        k = _unit(k)
        change = beta * (v - tl.sum(matrix * k[:, None], 0))
        matrix += k[:, None] * change[None, :]
        head_out = out + (token * num_heads + head) * VALUES
        tl.store(head_out + values, tl.sum(matrix * q[:, None], 0).to(out.dtype.element_ty), mask=is_value)
    tl.store(places, matrix, mask=inside)


@triton.jit
def _norm_kernel(
    heads: tl.tensor, gates: tl.tensor, weight: tl.tensor, epsilon: tl.tensor, out: tl.tensor, gate_stride: tl.tensor,
    num_heads: tl.tensor,
    VALUES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    values = tl.arange(0, BLOCK)[None, :]
    inside = (head < num_heads) & (values < VALUES)
    places = (token * num_heads + head) * VALUES + values
    loaded = tl.load(heads + places, mask=inside, other=0.0)
    wide = loaded.to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 1) / VALUES + tl.load(epsilon))
    normed = (wide * inverse[:, None]).to(loaded.dtype) * tl.load(weight + values, mask=values < VALUES, other=0.0)
    gate = tl.load(gates + token * gate_stride + head * VALUES + values, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + places, (normed.to(tl.float32) * (gate / (1.0 + tl.exp(-gate)))).to(loaded.dtype), mask=inside)


_scan = KernelLauncher(_scan_kernel)
_norm = KernelLauncher(_norm_kernel)


def gated_delta(channels: Tensor, gates: DeltaGates, state: Tensor, rows: StateRows, *, in_blocks: bool) -> Tensor:
    """See ``kernels.gated_delta``: channels [T, C], state [N, H, K, V] -> [T, H, V]."""
    num_heads, key_size, value_size = state.shape[1:]
    num_channels = channels.shape[1]
    num_key_heads = (num_channels - num_heads * value_size) // (2 * key_size)
    make = torch.empty if rows.blocks is None else torch.zeros  # padding tokens belong to no row
    out = make((channels.shape[0], num_heads, value_size), dtype=channels.dtype, device=channels.device)
    group, block_k = num_heads // num_key_heads, next_power_of_2(key_size)
    stride = gates.steps.stride(0)
    has_blocks = in_blocks and rows.blocks is not None
    most = delta_blocks.LEAST_TOKENS - 1 if has_blocks else sys.maxsize
    block_v = min(_VALUES, next_power_of_2(value_size))
    sizes = group, key_size, value_size
    arguments = (
        *(channels, gates.steps, gates.scores, gates.log_rate, gates.bias, state),
        *(rows.slots, rows.starts, rows.ends, out, num_channels, stride, num_heads, key_size**-0.5),
        *(*sizes, block_k, block_v, most),
    )
    key = channels.dtype, num_channels, stride, num_heads, *sizes, *alignments(gates.steps, gates.scores, state)
    key = (*key, has_blocks, *rows_key(rows))
    _scan((-(-value_size // block_v), num_heads, len(rows.slots)), key, arguments, {"num_warps": 1})
    if has_blocks:
        delta_blocks.compute(channels, gates, state, rows, out=out, key=key)
    return out


def gated_rms_norm(heads: Tensor, gates: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """See ``kernels.norms.gated_rms_norm``: heads [T, H, V], gates [T, H * V], weight [V] -> [T, H * V]."""
    num_tokens, num_heads, value_size = heads.shape
    out = torch.empty((num_tokens, num_heads * value_size), dtype=heads.dtype, device=heads.device)
    block = next_power_of_2(value_size)
    arguments = (heads, gates, weight, epsilon, out, gates.stride(0), num_heads, value_size, block)
    key = (heads.dtype, gates.stride(0), num_heads, value_size, gates.data_ptr() % 16)
    _norm((num_tokens, -(-num_heads // HEADS.value), 1), key, arguments, {"num_warps": 4})
    return out
