"""Logprobs of tokens and of the K most likely tokens on a GPU, in one pass over the logits.

The first kernel reads all logits. It stores three kinds of numbers: the largest logit of each block, the sum of
exp(logit - largest) of each block, and the largest logit of each segment of a block. The second kernel finds the
segments with the largest logits, which contain the most likely tokens, and reads only these. The result of a row
depends only on its logits and its requested tokens: the summation order depends only on V, and each logprob is logit -
row_max - log_mass.

N rows, V vocabulary, B blocks, S segments of a row, K most likely tokens, M requested tokens, W = 2 + 2 K + M.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.triton.launcher import kernel, next_power_of_2

SEGMENT_SIZE = tl.constexpr(128)
SEGMENTS_PER_BLOCK = tl.constexpr(16)

FEW, MANY = 8, 64
"""The second kernel is compiled twice: for K up to 8, and for K up to 64."""

REQUESTED_BLOCK = tl.constexpr(64)
"""Requested tokens that are read at a time."""


@kernel()
def _summary_kernel(
    logits: tl.tensor, row_stride: tl.tensor, num_tokens: tl.tensor, summary: tl.tensor, summary_stride: tl.tensor
) -> None:
    """Fill summary [N, 2 B + S]: largest logits of blocks, masses of blocks, largest logits of segments."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    segments = tl.arange(0, SEGMENTS_PER_BLOCK)
    columns = (block * SEGMENTS_PER_BLOCK + segments[:, None]) * SEGMENT_SIZE + tl.arange(0, SEGMENT_SIZE)[None, :]
    x = tl.load(logits + row * row_stride + columns, mask=columns < num_tokens, other=-float("inf")).to(tl.float32)
    best = tl.max(x, 1)
    largest = tl.max(best, 0)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    mass = tl.sum(tl.sum(tl.exp(x - base), 1), 0)
    out = summary + row * summary_stride
    num_blocks = tl.num_programs(1)
    tl.store(out + block, largest)
    tl.store(out + num_blocks + block, mass)
    tl.store(out + 2 * num_blocks + block * SEGMENTS_PER_BLOCK + segments, best)


@triton.jit
def _keys(x: tl.tensor, ids: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Return int64 keys: a larger value has a larger key; among equal values, the smaller id has the larger key.

    Where not ``inside``: the smallest key.
    """
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # turns -0.0 into 0.0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (order.to(tl.int64) << 32) + (0x7FFFFFFF - ids).to(tl.int64)
    return tl.where(inside, keys, -0x7FFFFFFFFFFFFFFF)


@kernel(
    do_not_specialize=["num_top", "num_requested"],
    do_not_specialize_on_alignment=["token_ids", "requested", "summary", "out"],
)
def _measure_kernel(
    logits: tl.tensor, row_stride: tl.tensor, num_tokens: tl.tensor, summary: tl.tensor, num_blocks: tl.tensor,
    token_ids: tl.tensor, num_top: tl.tensor, requested: tl.tensor, num_requested: tl.tensor, out: tl.tensor,
    BLOCKS: tl.constexpr, TOP: tl.constexpr,
) -> None:  # fmt: skip
    """Fill out [N, W] int32, see ``kernels.token_logprobs``."""
    row = tl.program_id(0).to(tl.int64)
    num_segments = num_blocks * SEGMENTS_PER_BLOCK
    x = logits + row * row_stride
    own_summary = summary + row * (2 * num_blocks + num_segments)
    blocks = tl.arange(0, BLOCKS)
    largest = tl.load(own_summary + blocks, mask=blocks < num_blocks, other=-float("inf"))
    masses = tl.load(own_summary + num_blocks + blocks, mask=blocks < num_blocks, other=0.0)
    row_max = tl.max(largest, 0)
    log_mass = tl.log(tl.sum(masses * tl.exp(largest - row_max), 0))

    out += row * (2 + 2 * num_top + num_requested)
    token_id = tl.load(token_ids + row)
    tl.store(out, (tl.load(x + token_id).to(tl.float32) - row_max - log_mass).to(tl.int32, bitcast=True))
    for first in range(0, num_requested, REQUESTED_BLOCK):
        places = first + tl.arange(0, REQUESTED_BLOCK)
        inside = places < num_requested
        ids = tl.load(requested + row * num_requested + places, mask=inside, other=0)
        values = tl.load(x + ids, mask=inside, other=0.0).to(tl.float32) - row_max - log_mass
        tl.store(out + 1 + num_top + places, values.to(tl.int32, bitcast=True), mask=inside)
    ids_out = out + 1 + num_top + num_requested
    tl.store(ids_out, token_id.to(tl.int32))

    if num_top > 0:
        segments = tl.arange(0, BLOCKS * SEGMENTS_PER_BLOCK)
        is_segment = segments < num_segments
        keys = _keys(tl.load(own_summary + 2 * num_blocks + segments, mask=is_segment, other=0.0), segments, is_segment)
        places = tl.arange(0, TOP)
        chosen = tl.full((TOP,), -1, tl.int32)
        for place in range(tl.minimum(num_top, num_segments)):
            best = tl.max(keys, 0)
            chosen = tl.where(places == place, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), chosen)
            keys = tl.where(keys == best, -0x7FFFFFFFFFFFFFFF, keys)
        columns = tl.reshape(
            chosen[:, None] * SEGMENT_SIZE + tl.arange(0, SEGMENT_SIZE)[None, :], (TOP * SEGMENT_SIZE,)
        )
        inside = (columns >= 0) & (columns < num_tokens)
        keys = _keys(tl.load(x + columns, mask=inside, other=0.0).to(tl.float32), columns, inside)
        for place in range(num_top):
            best = tl.max(keys, 0)
            keys = tl.where(keys == best, -0x7FFFFFFFFFFFFFFF, keys)
            order = (best >> 32).to(tl.int32)
            value = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True) - row_max - log_mass
            tl.store(out + 1 + place, value.to(tl.int32, bitcast=True))
            tl.store(ids_out + 1 + place, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32))


def measure(logits: Tensor, token_ids: Tensor, num_top: int, requested: Tensor | None) -> Tensor:
    """See ``kernels.token_logprobs``: logits [N, V], token_ids [N], requested [N, M] -> [N, W]. K <= ``MANY``."""
    num_rows, width = logits.shape
    num_blocks = triton.cdiv(width, SEGMENT_SIZE.value * SEGMENTS_PER_BLOCK.value)
    num_requested = 0 if requested is None else requested.shape[1]
    summary = torch.empty(num_rows, num_blocks * (2 + SEGMENTS_PER_BLOCK.value), device=logits.device)
    out = torch.empty(num_rows, 2 + 2 * num_top + num_requested, dtype=torch.int32, device=logits.device)
    rows = logits, logits.stride(0), width
    key = logits.dtype, logits.stride(0), width, logits.data_ptr() % 16
    arguments = (*rows, summary, summary.stride(0))
    _summary_kernel((num_rows, num_blocks, 1), key, arguments, {"num_warps": 1})
    blocks, max_top = next_power_of_2(num_blocks), FEW if num_top <= FEW else MANY
    # without requested tokens, any pointer: it is not read
    tokens = token_ids, num_top, token_ids if requested is None else requested, num_requested
    arguments = (*rows, summary, num_blocks, *tokens, out, blocks, max_top)
    _measure_kernel((num_rows, 1, 1), (*key, max_top), arguments, {"num_warps": 4 if max_top == FEW else 8})
    return out
