"""The gated delta rule for rows of many tokens, in blocks (arXiv 2412.06464, section 3.3).

Within a block, the changes that its tokens make to the matrix depend on one another linearly. So they are solved for at
once, for any matrix S before the block: token i writes the value u_i - S^T w_i for its key. All blocks are solved side
by side; then the matrix goes from block to block, with a few matmuls for each.

T packed tokens, C channels, H value heads, K and V sizes of a head, N slots, R rows, B blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from aioengine.kernels.state_rows import BLOCK_TOKENS
from aioengine.kernels.triton.launcher import Launcher, next_power_of_2

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.kernels.delta_gates import DeltaGates
    from aioengine.kernels.state_rows import StateRows

LEAST_TOKENS: Final = 32
"""Tokens of a row from which on blocks are faster than one token after the other."""

TOKENS = tl.constexpr(BLOCK_TOKENS)
LEAST = tl.constexpr(LEAST_TOKENS)
EPSILON = tl.constexpr(1e-6)

_VALUES = 32
"""Columns of a head's matrix that a program has."""


@triton.jit
def load_gates(
    steps: tl.tensor, scores: tl.tensor, places: tl.tensor, inside: tl.tensor, rate: tl.tensor, bias: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The logarithms of the decays, and beta; both 0 where not ``inside``."""
    given = tl.load(scores + places, mask=inside, other=0.0)
    beta = (1.0 / (1.0 + tl.exp(-given.to(tl.float32)))).to(given.dtype).to(tl.float32)
    step = tl.load(steps + places, mask=inside, other=0.0).to(tl.float32) + bias
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    return tl.where(inside, -tl.exp(rate) * step, 0.0), tl.where(inside, beta, 0.0)


@triton.jit
def _load_unit(pointers: tl.tensor, inside: tl.tensor) -> tl.tensor:
    x = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    return x / tl.sqrt_rn(tl.sum(x * x, 1) + EPSILON)[:, None]


@triton.jit
def decayed(products: tl.tensor, total: tl.tensor, is_chosen: tl.tensor) -> tl.tensor:
    """products [tokens, tokens] times the decays between them, where chosen, else 0."""
    between = tl.exp(tl.where(is_chosen, total[:, None] - total[None, :], 0.0))
    return tl.where(is_chosen, products * between, 0.0)


@triton.jit
def span_of(ends: tl.tensor, row: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The first token of a row, and how many it has."""
    begin = tl.load(ends + row - 1, mask=row > 0, other=0).to(tl.int64)
    return begin, tl.load(ends + row).to(tl.int64) - begin


@triton.jit
def load_matrix(
    state: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    row: tl.tensor,
    num_heads: tl.tensor,
    head: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    is_value: tl.tensor,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Pointers to the entries [keys, values] of the matrix of a head in the state of a row, and the entries: 0 where
    the row begins at position 0, and outside the sizes of the head.
    """
    slot = tl.load(slots + row).to(tl.int64)
    has_past = keys < tl.where(tl.load(starts + row) > 0, KEYS, 0)
    places = state + (slot * num_heads + head) * KEYS * VALUES + keys[:, None] * VALUES + values[None, :]
    return places, tl.load(places, mask=has_past[:, None] & is_value[None, :], other=0.0)


@triton.jit
def _solve_kernel(
    channels: tl.tensor,
    steps: tl.tensor,
    scores: tl.tensor,
    rates: tl.tensor,
    biases: tl.tensor,
    ends: tl.tensor,
    blocks: tl.tensor,
    keys_out: tl.tensor,
    values_out: tl.tensor,
    num_channels: tl.tensor,
    gate_stride: tl.tensor,
    num_heads: tl.tensor,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """w and u of the tokens of a block."""
    block, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(blocks + 2 * block)
    first = tl.load(blocks + 2 * block + 1)
    begin, count = span_of(ends, row)
    if (count < LEAST) | (first >= count):
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
    is_key = is_token[:, None] & (keys < KEYS)[None, :]
    k = _load_unit(at + first_key + head // GROUP * KEYS + keys[None, :], is_key)
    products = tl.dot(k, tl.trans(k), input_precision="tf32") * beta[:, None]
    system = decayed(products, total, order[:, None] > order[None, :])
    # the inverse of 1 + system, transposed, one row after the other
    inverse = tl.where(order[:, None] == order[None, :], 1.0, 0.0)
    for place in range(1, TOKENS):
        factors = tl.sum(tl.where(order[:, None] == place, system, 0.0), 0)
        change = tl.sum(factors[None, :] * inverse, 1)
        inverse = tl.where(order[None, :] == place, inverse - change[:, None], inverse)
    inverse = tl.trans(inverse)
    w = tl.dot(inverse, k * (beta * tl.exp(total))[:, None], input_precision="tf32")
    heads, after = begin * num_heads + head, order[:, None] * num_heads
    tl.store(keys_out + heads * KEYS + after * KEYS + keys[None, :], w.to(keys_out.dtype.element_ty), mask=is_key)
    is_value = is_token[:, None] & (values < VALUES)[None, :]
    v = tl.load(at + 2 * first_key + head * VALUES + values[None, :], mask=is_value, other=0.0).to(tl.float32)
    u = tl.dot(inverse, v * beta[:, None], input_precision="tf32")
    values_out += heads * VALUES
    tl.store(values_out + after * VALUES + values[None, :], u.to(values_out.dtype.element_ty), mask=is_value)


# The outputs and the matrix of a row, one block after the other.
@triton.jit
def _rows_kernel(
    channels: tl.tensor,
    steps: tl.tensor,
    scores: tl.tensor,
    rates: tl.tensor,
    biases: tl.tensor,
    state: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    solved_keys: tl.tensor,
    solved_values: tl.tensor,
    out: tl.tensor,
    num_channels: tl.tensor,
    gate_stride: tl.tensor,
    num_heads: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    head, row = tl.program_id(1), tl.program_id(2)
    begin, count = span_of(ends, row)
    if count < LEAST:
        return
    keys, order = tl.arange(0, BLOCK_K), tl.arange(0, TOKENS)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = values < VALUES
    places, matrix = load_matrix(
        *(state, slots, starts, row, num_heads, head),
        *(keys, values, is_value, KEYS, VALUES),
    )
    rate, bias = tl.load(rates + head), tl.load(biases + head)
    for first in range(0, count, TOKENS):
        is_token = first + order < count
        gates = (begin + first) * gate_stride + head
        decays, _ = load_gates(steps + gates, scores + gates, order * gate_stride, is_token, rate, bias)
        total = tl.cumsum(decays, 0)
        at = channels + (begin + first) * num_channels + head // GROUP * KEYS
        at += order[:, None] * num_channels + keys[None, :]
        is_key = is_token[:, None] & (keys < KEYS)[None, :]
        q = _load_unit(at, is_key) * scale
        k = _load_unit(at + num_heads // GROUP * KEYS, is_key)
        heads, after = (begin + first) * num_heads + head, order[:, None] * num_heads
        w = solved_keys + heads * KEYS + (after * KEYS + keys[None, :])
        w = tl.load(w, mask=is_key, other=0.0).to(tl.float32)
        is_here = is_token[:, None] & is_value[None, :]
        after = after * VALUES + values[None, :]
        u = tl.load(solved_values + heads * VALUES + after, mask=is_here, other=0.0).to(tl.float32)
        written = u - tl.dot(w, matrix, input_precision="tf32")
        weights = decayed(tl.dot(q, tl.trans(k), input_precision="tf32"), total, order[:, None] >= order[None, :])
        found = tl.dot(q * tl.exp(total)[:, None], matrix, input_precision="tf32")
        found += tl.dot(weights, written, input_precision="tf32")
        tl.store(out + heads * VALUES + after, found.to(out.dtype.element_ty), mask=is_here)
        whole = tl.sum(decays, 0)
        k *= tl.exp(whole - total)[:, None]
        matrix = matrix * tl.exp(whole) + tl.dot(tl.trans(k), written, input_precision="tf32")
    tl.store(places, matrix, mask=(keys < KEYS)[:, None] & is_value[None, :])


_solve = Launcher(_solve_kernel)
_rows = Launcher(_rows_kernel)


def compute(
    channels: Tensor, gates: DeltaGates, state: Tensor, rows: StateRows, *, out: Tensor, key: tuple[object, ...]
) -> None:
    """Write the outputs [T, H, V] and the states of the rows with at least ``LEAST_TOKENS`` tokens.

    channels: [T, C]. state: [N, H, K, V]. key: as in ``Launcher``, for these tensors.
    """
    assert rows.blocks is not None, "no row has several tokens"
    num_heads, key_size, value_size = state.shape[1:]
    num_tokens, num_channels = channels.shape
    group = num_heads // ((num_channels - num_heads * value_size) // (2 * key_size))
    solved_keys = torch.empty((num_tokens, num_heads, key_size), dtype=channels.dtype, device=channels.device)
    solved_values = torch.empty_like(out)
    block_k, block_v = max(next_power_of_2(key_size), 16), max(next_power_of_2(value_size), 16)
    stride = gates.steps.stride(0)
    given = channels, gates.steps, gates.scores, gates.log_rate, gates.bias
    arguments = (
        *(*given, rows.ends, rows.blocks, solved_keys, solved_values, num_channels, stride, num_heads),
        *(group, key_size, value_size, block_k, block_v),
    )
    _solve((len(rows.blocks), num_heads, 1), key, arguments, {"num_warps": 8})
    block_v = min(block_v, _VALUES)
    arguments = (
        *(*given, state, rows.slots, rows.starts, rows.ends, solved_keys, solved_values, out),
        *(num_channels, stride, num_heads, key_size**-0.5, group, key_size, value_size, block_k, block_v),
    )
    stages = 3 if channels.itemsize == 2 else 1  # loads of 4 bytes in three stages do not fit into shared memory
    options = {"num_warps": 8, "num_stages": stages}
    _rows((-(-value_size // block_v), num_heads, len(rows.slots)), key, arguments, options)
