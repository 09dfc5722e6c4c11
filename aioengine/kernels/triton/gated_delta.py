"""The gated delta rule (``kernels.gated_delta``) and the gated norm.

Short rows are computed token after token, with a part of the state matrix in registers (``_scan_kernel``): a program
has some value columns of one head of a row.

Long rows may be computed in blocks (arXiv 2412.06464, section 3.3). Within a block, the updates of the state matrix
form a linear system. It is solved for any state S before the block: token i writes the value u_i - S^T w_i for its key.
All blocks are solved in parallel (``_solve_kernel``, a program per block and head). Then the state is passed from block
to block, with four matmuls per block (``_rows_kernel``, programs as for short rows). The operands are in bf16 if the
channels are, else in tf32; sums are in fp32. q and k enter the matmuls unnormalized; their normalization is a factor
per token. A result then depends on the place of the token in its block.

T packed tokens, C channels, H value heads, G key heads, K and V sizes of a head, N slots, R rows, B blocks.
"""

from __future__ import annotations

import sys
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.state_types import BLOCK_TOKENS, DeltaGates, StateRows
from aioengine.kernels.triton.activation import silu_of, softplus_of
from aioengine.kernels.triton.causal_conv import TOKENS, rows_key, span_of
from aioengine.kernels.triton.launcher import alignments, kernel, next_power_of_2

MIN_TOKENS: Final = 32
"""Rows with at least this many tokens are faster in blocks than token by token."""

MIN_COUNT = tl.constexpr(MIN_TOKENS)
LEVELS = tl.constexpr(BLOCK_TOKENS.bit_length() - 1)
EPSILON = tl.constexpr(1e-6)

SCAN_VALUES, BLOCK_VALUES = 16, 32
"""State matrix columns per program, token by token and in blocks. One warp adds over keys without shared memory."""
_FACTORS: Final = 3
"""Factors per token and head, see ``_store_reading``."""


@triton.jit
def load_gates(
    steps: tl.tensor, scores: tl.tensor, places: tl.tensor, inside: tl.tensor, rate: tl.tensor, bias: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return log(decay) and beta; both are 0 where not ``inside``."""
    score = tl.load(scores + places, mask=inside, other=0.0)
    beta = (1.0 / (1.0 + tl.exp(-score.to(tl.float32)))).to(score.dtype).to(tl.float32)
    step = softplus_of(tl.load(steps + places, mask=inside, other=0.0).to(tl.float32) + bias)
    return tl.where(inside, -tl.exp(rate) * step, 0.0), tl.where(inside, beta, 0.0)


@triton.jit
def decayed(products: tl.tensor, total: tl.tensor, is_chosen: tl.tensor) -> tl.tensor:
    """Multiply products [tokens, tokens] by the decay between the two tokens; 0 where not chosen."""
    between = tl.exp(tl.where(is_chosen, total[:, None] - total[None, :], 0.0))
    return tl.where(is_chosen, products * between, 0.0)


@triton.jit
def load_matrix(
    state: tl.tensor, slots: tl.tensor, starts: tl.tensor, row: tl.tensor, num_heads: tl.tensor, head: tl.tensor,
    keys: tl.tensor, values: tl.tensor, is_value: tl.tensor,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Return pointers to the elements [keys, values] of a head's state matrix, and the elements. They are 0 if the row
    starts at position 0, and outside of the head size.
    """
    slot = tl.load(slots + row).to(tl.int64)
    has_past = keys < tl.where(tl.load(starts + row) > 0, KEYS, 0)
    places = state + (slot * num_heads + head) * KEYS * VALUES + keys[:, None] * VALUES + values[None, :]
    return places, tl.load(places, mask=has_past[:, None] & is_value[None, :], other=0.0)


@triton.jit
def _inverse_length(x: tl.tensor) -> tl.tensor:
    """x [tokens, K] -> [tokens]."""
    wide = x.to(tl.float32)
    return 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 1) + EPSILON)


@triton.jit
def _inverted(system: tl.tensor, NARROW: tl.constexpr) -> tl.tensor:
    """Return the inverse of 1 + system, where system is strictly lower triangular: first for diagonal blocks of size 2,
    then of size 4, and so on. No element exceeds 1, so fp16 is as accurate as tf32, and faster.
    """
    order = tl.arange(0, TOKENS)
    apart = order[:, None] ^ order[None, :]
    inverse = tl.where(apart == 0, 1.0, 0.0) - tl.where(apart == 1, system, 0.0)
    for level in tl.static_range(1, LEVELS):
        corners = tl.where((apart >> level) == 1, system, 0.0).to(NARROW)
        narrow = inverse.to(NARROW)
        changes = tl.dot(narrow, corners, input_precision="tf32").to(NARROW)
        inverse -= tl.dot(changes, narrow, input_precision="tf32")
    return inverse


@triton.jit
def _times(factors: tl.tensor, x: tl.tensor) -> tl.tensor:
    """Return factors [tokens, tokens] fp32 times x [tokens, N]. If x is bf16, factors are split into two bf16 parts."""
    if x.dtype == tl.float32:
        return tl.dot(factors, x, input_precision="tf32")
    high = factors.to(x.dtype)
    return tl.dot((factors - high.to(tl.float32)).to(x.dtype), x, tl.dot(high, x))


@triton.jit
def _store_reading(
    at_query: tl.tensor, is_key: tl.tensor, k: tl.tensor, k_length: tl.tensor, decays: tl.tensor,
    weights_out: tl.tensor, factors_out: tl.tensor, is_token: tl.tensor, num_factors: tl.tensor, stride: tl.tensor,
    scale: tl.tensor,
) -> None:  # fmt: skip
    """Store the attention weights [tokens, tokens] within a block, and three factors per token: for reading the state
    before the block, for the decay of its update until the end of the block, and for the decay of the state.
    """
    order = tl.arange(0, TOKENS)
    total, whole = tl.cumsum(decays, 0), tl.sum(decays, 0)
    q = tl.load(at_query, mask=is_key, other=0.0).to(k.dtype)
    q_length = _inverse_length(q) * scale
    weights = tl.dot(q, tl.trans(k), input_precision="tf32") * q_length[:, None] * k_length[None, :]
    weights = decayed(weights, total, order[:, None] >= order[None, :]).to(weights_out.dtype.element_ty)
    places = order[:, None] * (stride * TOKENS) + order[None, :]
    tl.store(weights_out + places, weights, mask=is_token[:, None])
    factors_out += order
    tl.store(factors_out, q_length * tl.exp(total), mask=is_token)
    tl.store(factors_out + num_factors, k_length * tl.exp(whole - total), mask=is_token)
    tl.store(factors_out + 2 * num_factors, tl.exp(whole) + tl.zeros_like(total), mask=is_token)


@kernel(do_not_specialize=["num_tokens"])
def _solve_kernel(
    channels: tl.tensor, steps: tl.tensor, scores: tl.tensor, rates: tl.tensor, biases: tl.tensor, ends: tl.tensor,
    blocks: tl.tensor, keys_out: tl.tensor, values_out: tl.tensor, weights_out: tl.tensor, factors_out: tl.tensor,
    num_channels: tl.tensor, gate_stride: tl.tensor, num_heads: tl.tensor, num_tokens: tl.tensor, scale: tl.tensor,
    GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PRODUCT: tl.constexpr,
) -> None:  # fmt: skip
    """Store w and u of the tokens of a block, then call ``_store_reading``."""
    block, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(blocks + 2 * block)
    first = tl.load(blocks + 2 * block + 1)
    begin, count = span_of(ends, row)
    if (count < MIN_COUNT) | (first >= count):
        return
    keys, values, order = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V), tl.arange(0, TOKENS)
    is_token = first + order < count
    begin += first
    gates = begin * gate_stride + head
    decays, beta = load_gates(
        steps + gates, scores + gates, order * gate_stride, is_token, tl.load(rates + head), tl.load(biases + head)
    )
    total = tl.cumsum(decays, 0)
    first_key = num_heads // GROUP * KEYS
    at = channels + begin * num_channels + order[:, None] * num_channels
    at_query = at + head // GROUP * KEYS + keys[None, :]
    is_key = is_token[:, None] & (keys < KEYS)[None, :]
    k = tl.load(at_query + first_key, mask=is_key, other=0.0).to(PRODUCT)
    k_length = _inverse_length(k)
    system = tl.dot(k, tl.trans(k), input_precision="tf32") * (beta * k_length)[:, None] * k_length[None, :]
    NARROW: tl.constexpr = tl.float32 if keys_out.dtype.element_ty == tl.float32 else tl.float16
    inverse = _inverted(decayed(system, total, order[:, None] > order[None, :]), NARROW)
    heads = begin * num_heads + head
    w = _times(inverse * (beta * k_length * tl.exp(total))[None, :], k)
    keys_out += heads * KEYS + order[:, None] * (num_heads * KEYS) + keys[None, :]
    tl.store(keys_out, w.to(keys_out.dtype.element_ty), mask=is_key)
    is_value = is_token[:, None] & (values < VALUES)[None, :]
    v = tl.load(at + 2 * first_key + head * VALUES + values[None, :], mask=is_value, other=0.0).to(PRODUCT)
    u = _times(inverse * beta[None, :], v)
    values_out += heads * VALUES + order[:, None] * (num_heads * VALUES) + values[None, :]
    tl.store(values_out, u.to(values_out.dtype.element_ty), mask=is_value)
    weights_out += heads * TOKENS
    factors_out += head.to(tl.int64) * num_tokens + begin
    num_factors = num_heads.to(tl.int64) * num_tokens
    _store_reading(
        at_query, is_key, k, k_length, decays, weights_out, factors_out, is_token, num_factors, num_heads, scale
    )


@kernel(do_not_specialize=["num_tokens"])
def _rows_kernel(
    channels: tl.tensor, state: tl.tensor, slots: tl.tensor, starts: tl.tensor, ends: tl.tensor, solved_keys: tl.tensor,
    solved_values: tl.tensor, solved_weights: tl.tensor, factors: tl.tensor, out: tl.tensor, num_channels: tl.tensor,
    num_heads: tl.tensor, num_tokens: tl.tensor, GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRODUCT: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the outputs and the state of a row, block after block."""
    head, row = tl.program_id(1), tl.program_id(2)
    begin, count = span_of(ends, row)
    if count < MIN_COUNT:
        return
    keys, order = tl.arange(0, BLOCK_K), tl.arange(0, TOKENS)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = values < VALUES
    places, matrix = load_matrix(state, slots, starts, row, num_heads, head, keys, values, is_value, KEYS, VALUES)
    factors += head.to(tl.int64) * num_tokens + begin
    num_factors = num_heads.to(tl.int64) * num_tokens
    for first in tl.range(0, count, TOKENS, num_stages=STAGES):
        is_token = first + order < count
        at = channels + (begin + first) * num_channels + head // GROUP * KEYS
        at += order[:, None] * num_channels + keys[None, :]
        is_key = is_token[:, None] & (keys < KEYS)[None, :]
        is_here = is_token[:, None] & is_value[None, :]
        heads, after = (begin + first) * num_heads + head, order * num_heads
        w = solved_keys + heads * KEYS + (after[:, None] * KEYS + keys[None, :])
        w = tl.load(w, mask=is_key, other=0.0).to(PRODUCT)
        to_value = after[:, None] * VALUES + values[None, :]
        u = tl.load(solved_values + heads * VALUES + to_value, mask=is_here, other=0.0)
        read = tl.load(factors + first + order, mask=is_token, other=0.0)
        left = tl.load(factors + num_factors + first + order, mask=is_token, other=0.0)
        q = tl.load(at, mask=is_key, other=0.0).to(PRODUCT)
        k = tl.load(at + num_heads // GROUP * KEYS, mask=is_key, other=0.0).to(PRODUCT)
        weights = solved_weights + heads * TOKENS + (after[:, None] * TOKENS + order[None, :])
        weights = tl.load(weights, mask=is_token[:, None], other=0.0).to(PRODUCT)
        before = matrix.to(PRODUCT)
        written = u.to(tl.float32) - tl.dot(w, before, input_precision="tf32")
        result = tl.dot(q, before, input_precision="tf32") * read[:, None]
        result = tl.dot(weights, written.to(PRODUCT), result, input_precision="tf32")
        tl.store(out + heads * VALUES + to_value, result.to(out.dtype.element_ty), mask=is_here)
        matrix *= tl.load(factors + 2 * num_factors + first)
        matrix = tl.dot(tl.trans(k), (written * left[:, None]).to(PRODUCT), matrix, input_precision="tf32")
    tl.store(places, matrix, mask=(keys < KEYS)[:, None] & is_value[None, :])


def compute_blocks(
    channels: Tensor, gates: DeltaGates, state: Tensor, rows: StateRows, *, out: Tensor, key: tuple[object, ...]
) -> None:
    """Write the outputs [T, H, V] and the states of rows with at least ``MIN_TOKENS`` tokens.

    channels: [T, C]. state: [N, H, K, V]. key: the ``KernelLauncher`` key of these tensors.
    """
    assert rows.blocks is not None, "no row has several tokens"
    num_heads, key_size, value_size = state.shape[1:]
    num_tokens, num_channels = channels.shape
    group = num_heads // ((num_channels - num_heads * value_size) // (2 * key_size))
    keys, weights = (channels.new_empty((num_tokens, num_heads, size)) for size in (key_size, BLOCK_TOKENS))
    values = torch.empty_like(out)
    factors = torch.empty((_FACTORS, num_heads, num_tokens), dtype=torch.float32, device=channels.device)
    is_bf16 = channels.dtype == torch.bfloat16
    product = tl.bfloat16 if is_bf16 else tl.float32
    sizes = group, key_size, value_size, max(next_power_of_2(key_size), 16)
    block_v = max(next_power_of_2(value_size), 16)
    tensors = channels, *gates, rows.ends, rows.blocks, keys, values, weights, factors
    numbers = num_channels, gates.steps.stride(0), num_heads, num_tokens, key_size**-0.5
    arguments = (*tensors, *numbers, *sizes, block_v, product)
    _solve_kernel((len(rows.blocks), num_heads, 1), key, arguments, {"num_warps": 4})
    block_v = min(block_v, BLOCK_VALUES)
    num_warps, stages = (4, 3) if is_bf16 else (8, 1)  # limited by registers and shared memory
    tensors = channels, state, rows.slots, rows.starts, rows.ends, keys, values, weights, factors, out
    arguments = (*tensors, num_channels, num_heads, num_tokens, *sizes, block_v, product, stages)
    _rows_kernel((-(-value_size // block_v), num_heads, len(rows.slots)), key, arguments, {"num_warps": num_warps})


HEADS = tl.constexpr(8)
"""Heads per program of the norm."""


@triton.jit
def _unit(x: tl.tensor) -> tl.tensor:
    return x / tl.sqrt_rn(tl.sum(x * x, 0) + EPSILON)


@kernel()
def _scan_kernel(
    channels: tl.tensor, steps: tl.tensor, scores: tl.tensor, log_rates: tl.tensor, biases: tl.tensor, state: tl.tensor,
    slots: tl.tensor, starts: tl.tensor, ends: tl.tensor, out: tl.tensor, num_channels: tl.tensor,
    gate_stride: tl.tensor, num_heads: tl.tensor, scale: tl.tensor,
    GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    MAX_COUNT: tl.constexpr,
) -> None:  # fmt: skip
    """Compute the outputs and the state of a row of up to ``MAX_COUNT`` tokens, token after token."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    keys = tl.arange(0, BLOCK_K)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = keys < KEYS, values < VALUES
    inside = is_key[:, None] & is_value[None, :]
    begin, count = span_of(ends, row)
    end = begin + count
    if (count > MAX_COUNT) | (count == 0):
        return
    places, matrix = load_matrix(state, slots, starts, row, num_heads, head, keys, values, is_value, KEYS, VALUES)
    rate, bias = tl.load(log_rates + head), tl.load(biases + head)
    key_head = head // GROUP
    first_key = num_heads // GROUP * KEYS
    for token in range(begin, end):
        at = channels + token * num_channels
        q = tl.load(at + key_head * KEYS + keys, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(at + first_key + key_head * KEYS + keys, mask=is_key, other=0.0).to(tl.float32)
        v = tl.load(at + 2 * first_key + head * VALUES + values, mask=is_value, other=0.0).to(tl.float32)
        decay, beta = load_gates(steps, scores, token * gate_stride + head, token < end, rate, bias)
        matrix *= tl.exp(decay)
        q = _unit(q) * scale
        k = _unit(k)
        change = beta * (v - tl.sum(matrix * k[:, None], 0))
        matrix += k[:, None] * change[None, :]
        head_out = out + (token * num_heads + head) * VALUES
        tl.store(head_out + values, tl.sum(matrix * q[:, None], 0).to(out.dtype.element_ty), mask=is_value)
    tl.store(places, matrix, mask=inside)


@kernel()
def _norm_kernel(
    heads: tl.tensor, gates: tl.tensor, weight: tl.tensor, epsilon: tl.tensor, out: tl.tensor, gate_stride: tl.tensor,
    num_heads: tl.tensor,
    VALUES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ``gated_rms_norm`` of some heads of a token."""
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
    tl.store(out + places, (normed.to(tl.float32) * silu_of(gate)).to(loaded.dtype), mask=inside)


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
    max_count = MIN_TOKENS - 1 if has_blocks else sys.maxsize
    block_v = min(SCAN_VALUES, next_power_of_2(value_size))
    sizes = group, key_size, value_size
    tensors = channels, *gates, state, rows.slots, rows.starts, rows.ends, out
    arguments = (*tensors, num_channels, stride, num_heads, key_size**-0.5, *sizes, block_k, block_v, max_count)
    key = channels.dtype, num_channels, stride, num_heads, *sizes, *alignments(gates.steps, gates.scores, state)
    key = (*key, has_blocks, *rows_key(rows))
    _scan_kernel((-(-value_size // block_v), num_heads, len(rows.slots)), key, arguments, {"num_warps": 1})
    if has_blocks:
        compute_blocks(channels, gates, state, rows, out=out, key=key)
    return out


def gated_rms_norm(heads: Tensor, gates: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    """See ``kernels.norms.gated_rms_norm``: heads [T, H, V], gates [T, H * V], weight [V] -> [T, H * V]."""
    num_tokens, num_heads, value_size = heads.shape
    out = torch.empty((num_tokens, num_heads * value_size), dtype=heads.dtype, device=heads.device)
    block = next_power_of_2(value_size)
    arguments = (heads, gates, weight, epsilon, out, gates.stride(0), num_heads, value_size, block)
    key = (heads.dtype, gates.stride(0), num_heads, value_size, gates.data_ptr() % 16)
    _norm_kernel((num_tokens, -(-num_heads // HEADS.value), 1), key, arguments, {"num_warps": 4})
    return out
