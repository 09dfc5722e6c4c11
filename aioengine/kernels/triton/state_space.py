"""The state space of Mamba 2 (``kernels.state_space``): short rows token by token, long rows in blocks of tokens.

A program has some value columns of one head of a row. Within a block, the outputs are products of matrices in tf32, as
in attention without softmax; the state is passed from block to block. A result then depends on the place of the token
in its block.

T packed tokens, C channels, H heads, G groups, K and V sizes of a head, N slots, R rows.
"""

from __future__ import annotations

import sys
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.state_types import SpaceWeights, StateRows
from aioengine.kernels.triton.activation import softplus_of
from aioengine.kernels.triton.causal_conv import TOKENS, rows_key, span_of
from aioengine.kernels.triton.gated_delta import BLOCK_VALUES, MIN_TOKENS, SCAN_VALUES, decayed, load_matrix
from aioengine.kernels.triton.launcher import alignments, kernel, next_power_of_2

_MAX_KEYS: Final = 128
"""Blocks of larger b and c do not fit into shared memory."""


@triton.jit
def _times(
    steps: tl.tensor, inside: tl.tensor, bias: tl.tensor, MIN_TIME: tl.constexpr, MAX_TIME: tl.constexpr
) -> tl.tensor:
    """Return dt; 0 where not ``inside``."""
    step = softplus_of(tl.load(steps, mask=inside, other=0.0).to(tl.float32) + bias)
    return tl.where(inside, tl.minimum(tl.maximum(step, MIN_TIME), MAX_TIME), 0.0)


@kernel()
def _rows_kernel(
    channels: tl.tensor, steps: tl.tensor, rates: tl.tensor, biases: tl.tensor, skips: tl.tensor, state: tl.tensor,
    slots: tl.tensor, starts: tl.tensor, ends: tl.tensor, out: tl.tensor, num_channels: tl.tensor,
    step_stride: tl.tensor, num_heads: tl.tensor,
    GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    MIN_TIME: tl.constexpr, MAX_TIME: tl.constexpr, MIN_COUNT: tl.constexpr, MAX_COUNT: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
) -> None:  # fmt: skip
    """Compute rows of ``MIN_COUNT`` to ``MAX_COUNT`` tokens."""
    head, row = tl.program_id(1), tl.program_id(2)
    begin, count = span_of(ends, row)
    if (count < MIN_COUNT) | (count > MAX_COUNT):
        return
    keys, order = tl.arange(0, BLOCK_K), tl.arange(0, TOKENS)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = keys < KEYS, values < VALUES
    places, matrix = load_matrix(state, slots, starts, row, num_heads, head, keys, values, is_value, KEYS, VALUES)
    rate, bias, skip = -tl.exp(tl.load(rates + head)), tl.load(biases + head), tl.load(skips + head)
    first_key = num_heads * VALUES + head // GROUP * KEYS
    if IN_BLOCKS:
        for first in range(0, count, TOKENS):
            is_token = first + order < count
            tokens = begin + first + order
            time = _times(steps + tokens * step_stride + head, is_token, bias, MIN_TIME, MAX_TIME)
            total = tl.cumsum(rate * time, 0)
            whole = tl.sum(rate * time, 0)
            at = channels + tokens[:, None] * num_channels
            is_read = is_token[:, None] & is_key[None, :]
            b = tl.load(at + first_key + keys[None, :], mask=is_read, other=0.0).to(tl.float32)
            c = at + first_key + num_heads // GROUP * KEYS + keys[None, :]
            c = tl.load(c, mask=is_read, other=0.0).to(tl.float32)
            is_here = is_token[:, None] & is_value[None, :]
            x = tl.load(at + head * VALUES + values[None, :], mask=is_here, other=0.0).to(tl.float32)
            products = tl.dot(c, tl.trans(b), input_precision="tf32")
            products = decayed(products, total, order[:, None] >= order[None, :])
            written = x * time[:, None]
            result = tl.dot(products, written, input_precision="tf32") + skip * x
            result += tl.dot(c * tl.exp(total)[:, None], matrix, input_precision="tf32")
            target = out + (tokens[:, None] * num_heads + head) * VALUES + values[None, :]
            tl.store(target, result.to(out.dtype.element_ty), mask=is_here)
            b *= tl.exp(whole - total)[:, None]
            matrix = matrix * tl.exp(whole) + tl.dot(tl.trans(b), written, input_precision="tf32")
    else:
        for token in range(begin, begin + count):
            at = channels + token * num_channels
            b = tl.load(at + first_key + keys, mask=is_key, other=0.0).to(tl.float32)
            c = tl.load(at + first_key + num_heads // GROUP * KEYS + keys, mask=is_key, other=0.0).to(tl.float32)
            x = tl.load(at + head * VALUES + values, mask=is_value, other=0.0).to(tl.float32)
            time = _times(steps + token * step_stride + head, token >= begin, bias, MIN_TIME, MAX_TIME)
            matrix = matrix * tl.exp(rate * time) + b[:, None] * (time * x)[None, :]
            result = tl.sum(matrix * c[:, None], 0) + skip * x
            head_out = out + (token * num_heads + head) * VALUES
            tl.store(head_out + values, result.to(out.dtype.element_ty), mask=is_value)
    tl.store(places, matrix, mask=is_key[:, None] & is_value[None, :])


def state_space(
    channels: Tensor, steps: Tensor, weights: SpaceWeights, state: Tensor, *, rows: StateRows, in_blocks: bool
) -> Tensor:
    """See ``kernels.state_space``: channels [T, C], steps [T, H], state [N, H, K, V] -> [T, H, V]."""
    num_heads, key_size, value_size = state.shape[1:]
    num_tokens, num_channels = channels.shape
    num_groups = (num_channels - num_heads * value_size) // (2 * key_size)
    make = torch.empty if rows.blocks is None else torch.zeros  # padding tokens belong to no row
    out = make((num_tokens, num_heads, value_size), dtype=channels.dtype, device=channels.device)
    has_blocks = in_blocks and rows.blocks is not None and key_size <= _MAX_KEYS
    tensors = channels, steps, weights.log_rate, weights.bias, weights.skip, state, rows.slots, rows.starts, rows.ends
    sizes = num_channels, steps.stride(0), num_heads, num_heads // num_groups, key_size, value_size
    key = (channels.dtype, *sizes, *weights.limits, *alignments(steps, state), has_blocks, *rows_key(rows))
    block_k, block_v = max(next_power_of_2(key_size), 16), max(next_power_of_2(value_size), 16)
    max_count = MIN_TOKENS - 1 if has_blocks else sys.maxsize
    forms = (False, SCAN_VALUES, 1, max_count, 1), (True, BLOCK_VALUES, MIN_TOKENS, sys.maxsize, 8)
    for in_blocks, max_values, min_count, max_count, num_warps in forms[: 1 + has_blocks]:
        blocks = block_k, min(block_v, max_values)
        grid = (-(-value_size // blocks[1]), num_heads, len(rows.slots))
        arguments = (*tensors, out, *sizes, *blocks, *weights.limits, min_count, max_count, in_blocks)
        _rows_kernel(grid, (*key, in_blocks), arguments, {"num_warps": num_warps})
    return out
