"""Causal depthwise convolution on a GPU: out[t] = SiLU(bias + sum over w of weight[:, w] * x[t - W + 1 + w]), [T, C].

The last inputs of each row are kept in a state pool. The W products of an element are added in fp32, oldest first, so a
result does not depend on the chunk that contains the token.

Programs: if all rows have one token, a program computes some channels of a row and moves its state
(``_step_kernel``). Otherwise a program computes some channels of a block of tokens (``_block_kernel``), and then
``_state_kernel`` stores the last inputs of each row.

T packed tokens, C channels, W filter width, N slots, R rows, B blocks of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.state_types import BLOCK_TOKENS, StateRows
from aioengine.kernels.triton.activation import silu_of
from aioengine.kernels.triton.launcher import alignments, dtypes, kernel

CHANNELS, BLOCK_CHANNELS = tl.constexpr(256), tl.constexpr(64)
"""Channels per program, and in ``_block_kernel``."""
TOKENS = tl.constexpr(BLOCK_TOKENS)


@triton.jit
def _result(total: tl.tensor, bias: tl.tensor, channels: tl.tensor, inside: tl.tensor, SILU: tl.constexpr) -> tl.tensor:
    """Add biases to ``total`` if there are any, and apply SiLU. channels: broadcast to the shape of ``total``."""
    if bias is not None:
        total += tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)
    return silu_of(total) if SILU else total


@triton.jit
def span_of(ends: tl.tensor, row: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the first token of a row and its number of tokens."""
    begin = tl.load(ends + row - 1, mask=row > 0, other=0).to(tl.int64)
    return begin, tl.load(ends + row).to(tl.int64) - begin


@triton.jit
def _past_inputs(
    state: tl.tensor, slots: tl.tensor, starts: tl.tensor, row: tl.tensor, channels: tl.tensor, num_channels: tl.tensor,
    WIDTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Return pointers to the oldest inputs in a row's state, and the channels that have them: none at position 0."""
    slot = tl.load(slots + row).to(tl.int64)
    has_past = channels < tl.where(tl.load(starts + row) > 0, num_channels, 0)
    return state + slot * (WIDTH - 1) * num_channels + channels, has_past


@kernel()
def _step_kernel(
    x: tl.tensor, weight: tl.tensor, state: tl.tensor, slots: tl.tensor, starts: tl.tensor, bias: tl.tensor,
    out: tl.tensor, x_stride: tl.tensor, num_channels: tl.tensor,
    WIDTH: tl.constexpr, SILU: tl.constexpr,
) -> None:  # fmt: skip
    """Compute one token of a row. Each thread only reads and writes the state of its own channels."""
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < num_channels
    inputs, has_past = _past_inputs(state, slots, starts, row, channels, num_channels, WIDTH)
    newest = tl.load(x + row * x_stride + channels, mask=inside, other=0.0)
    total = tl.zeros([CHANNELS], dtype=tl.float32)
    for place in tl.static_range(WIDTH - 1):
        past = tl.load(inputs + place * num_channels, mask=has_past, other=0.0)
        total += past.to(tl.float32) * tl.load(weight + channels * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
        if place > 0:
            tl.store(inputs + (place - 1) * num_channels, past, mask=inside)
    tl.store(inputs + (WIDTH - 2) * num_channels, newest, mask=inside)
    factor = tl.load(weight + channels * WIDTH + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)
    total += newest.to(tl.float32) * factor
    total = _result(total, bias, channels, inside, SILU)
    tl.store(out + row * num_channels + channels, total.to(newest.dtype), mask=inside)


@kernel()
def _block_kernel(
    x: tl.tensor, weight: tl.tensor, state: tl.tensor, slots: tl.tensor, starts: tl.tensor, ends: tl.tensor,
    blocks: tl.tensor, bias: tl.tensor, out: tl.tensor, x_stride: tl.tensor, num_channels: tl.tensor,
    WIDTH: tl.constexpr, SILU: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a block of tokens of a row. Does not change states, because other programs read them too."""
    block = tl.program_id(0)
    row = tl.load(blocks + 2 * block)
    first = tl.load(blocks + 2 * block + 1)
    channels = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    inside = channels < num_channels
    begin, count = span_of(ends, row)
    if first >= count:
        return
    tokens = first + tl.arange(0, TOKENS)
    inputs, has_past = _past_inputs(state, slots, starts, row, channels, num_channels, WIDTH)
    total = tl.zeros([TOKENS, BLOCK_CHANNELS], dtype=tl.float32)
    for place in tl.static_range(WIDTH):
        source = tokens + (place - WIDTH + 1)
        is_new = ((source >= 0) & (source < count))[:, None] & inside[None, :]
        new = tl.load(x + (begin + source)[:, None] * x_stride + channels[None, :], mask=is_new, other=0.0)
        is_past = (source < 0)[:, None] & has_past[None, :]
        past = tl.load(inputs[None, :] + (source + WIDTH - 1)[:, None] * num_channels, mask=is_past, other=0.0)
        factor = tl.load(weight + channels * WIDTH + place, mask=inside, other=0.0).to(tl.float32)
        total += (new.to(tl.float32) + past.to(tl.float32)) * factor[None, :]
    is_real = (tokens < count)[:, None] & inside[None, :]
    places = (begin + tokens)[:, None] * num_channels + channels[None, :]
    total = _result(total, bias, channels[None, :], inside[None, :], SILU)
    tl.store(out + places, total.to(x.dtype.element_ty), mask=is_real)


@kernel()
def _state_kernel(
    x: tl.tensor, state: tl.tensor, slots: tl.tensor, starts: tl.tensor, ends: tl.tensor, x_stride: tl.tensor,
    num_channels: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Store the last inputs of a row in its state. The remaining old inputs move towards the start, oldest first."""
    row = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channels < num_channels
    begin, count = span_of(ends, row)
    inputs, has_past = _past_inputs(state, slots, starts, row, channels, num_channels, WIDTH)
    for place in tl.static_range(WIDTH - 1):
        source = count - (WIDTH - 1) + place
        if source >= 0:
            new = tl.load(x + (begin + source) * x_stride + channels, mask=inside, other=0.0)
        else:
            new = tl.load(inputs + (place + count) * num_channels, mask=has_past, other=0.0)
        tl.store(inputs + place * num_channels, new, mask=inside)


def causal_conv(
    x: Tensor, weight: Tensor, state: Tensor, rows: StateRows, *, bias: Tensor | None, activates: bool
) -> Tensor:
    """See ``kernels.causal_conv``: x [T, C], weight [C, W], state [N, W - 1, C], bias [C] -> [T, C]."""
    num_channels, width = weight.shape
    out = torch.empty((x.shape[0], num_channels), dtype=x.dtype, device=x.device)
    sizes = x.stride(0), num_channels, width
    key = (x.dtype, *sizes, bias is None, activates, *alignments(x, state), *rows_key(rows))
    num_parts = -(-num_channels // CHANNELS.value)
    if rows.blocks is None:
        arguments = (x, weight, state, rows.slots, rows.starts, bias, out, *sizes, activates)
        _step_kernel((len(rows.slots), num_parts, 1), key, arguments, {"num_warps": 2})
        return out
    tensors = x, weight, state, rows.slots, rows.starts, rows.ends, rows.blocks, bias, out
    arguments = (*tensors, *sizes, activates)
    _block_kernel((len(rows.blocks), -(-num_channels // BLOCK_CHANNELS.value), 1), key, arguments, {"num_warps": 8})
    arguments = (x, state, rows.slots, rows.starts, rows.ends, *sizes)
    _state_kernel((len(rows.slots), num_parts, 1), key, arguments, {"num_warps": 2})
    return out


def rows_key(rows: StateRows) -> tuple[object, ...]:
    """Return the part of a ``KernelLauncher`` key that depends on the rows."""
    tensors = rows.slots, rows.starts, rows.ends
    return (*dtypes(*tensors), *alignments(*tensors), rows.blocks is None)
