"""The gated MLPs of a mixture of experts on a GPU.

Programs:

- With few tokens, a program multiplies one pair by some lines of its expert (``_vector_gated_kernel``), and then one
  token's K pairs by the same lines of K experts (``_vector_down_kernel``).
- More tokens are multiplied in tiles of pairs of one expert (``_tiled_kernel``, twice). The weight is the left operand,
  so that its outputs are the rows of the tensor core instruction. Then ``_sum_kernel`` adds the pairs of each token.

Sums: in fp32. Tiles add over the inputs from first to last. The K results of a token are added in the order in which
its experts were chosen, then the shared experts. With ``batch_invariant``, all rows use one tile size.

T tokens, D hidden size, F inner size, E experts, K experts per token, P = T * K (token, expert) pairs, O outputs of a
weight. A line is one output of one expert (``expert_codes``).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.codes import piece_of
from aioengine.kernels.expert_types import ChosenExperts, GateFunction, SharedOutputs
from aioengine.kernels.triton.activation import silu_of
from aioengine.kernels.triton.code_linear import dequantize
from aioengine.kernels.triton.dependent import wait_and_start_next
from aioengine.kernels.triton.device_codes import DeviceCodes
from aioengine.kernels.triton.expert_codes import (
    DeviceWeights,
    add_products,
    line_sums,
    stored_weight,
    vector_parts,
    vector_products,
    vector_zeros,
)
from aioengine.kernels.triton.invariant_linear import Tile, loaded
from aioengine.kernels.triton.launcher import alignments, kernel, options
from aioengine.kernels.triton.routing import Tiling, align


@triton.jit
def _activate(gate: tl.tensor, up: tl.tensor, GATE: tl.constexpr, narrow: tl.constexpr) -> tl.tensor:
    """gate and up [...] fp32 -> [...]. Rounds like a separate matmul and activation."""
    gate, up = gate.to(narrow).to(tl.float32), up.to(narrow).to(tl.float32)
    if GATE.limit > 0:
        gate = tl.minimum(gate, GATE.limit)
        up = tl.minimum(tl.maximum(up, -GATE.limit), GATE.limit)
        return ((up + 1.0) * (gate / (1.0 + tl.exp(-gate * GATE.alpha)))).to(narrow)
    return silu_of(gate).to(narrow) * up.to(narrow)


@kernel(do_not_specialize=["max_tiles"])
def _tiled_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, offsets: tl.tensor, zeros: tl.tensor, table: tl.tensor,
    num_lines: tl.tensor, bias: tl.tensor, out: tl.tensor, order: tl.tensor, tiles: tl.tensor, num_tiles: tl.tensor,
    max_tiles: tl.tensor,
    NUM_OUTPUTS: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, GATE: tl.constexpr, LAYOUT: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile: some pairs of one expert, and a block of outputs.

    With GATE: x [T, D] -> activated [P, F], in the order of the tiling. Without: x [P, F] in this order -> [P, D], in
    the order of pairs. tiles: expert, start and end of the pairs in ``order``.
    """
    IS_GATED: tl.constexpr = GATE is not None
    codes = scales, offsets, zeros, table, num_lines
    num_blocks = tl.cdiv(NUM_OUTPUTS, OUTPUTS)  # a constant, so that the compiler knows that stores are aligned
    tile = tl.program_id(0) // num_blocks
    outputs = tl.program_id(0) % num_blocks * OUTPUTS + tl.arange(0, OUTPUTS)
    wait_and_start_next()
    expert, first, end = tl.load(tiles + tile), tl.load(tiles + max_tiles + tile), tl.load(tiles + 2 * max_tiles + tile)
    if tile < tl.load(num_tiles):  # otherwise the loaded numbers are undefined
        rows = first + tl.arange(0, ROWS)
        is_row = rows < end
        rows = tl.where(is_row, rows, first)  # beyond the end, repeat the first row, which avoids a mask
        pairs = tl.load(order + rows)
        places = (pairs // TOP_K if IS_GATED else rows).to(tl.int64) * SIZE
        lines = expert.to(tl.int64) * ((2 if IS_GATED else 1) * NUM_OUTPUTS)
        lines += tl.where(outputs < NUM_OUTPUTS, outputs, 0)
        columns = tl.arange(0, BLOCK)
        x_pointers = x + places[None, :] + columns[:, None]
        total, up = tl.zeros((OUTPUTS, ROWS), tl.float32), tl.zeros((OUTPUTS, ROWS), tl.float32)
        IS_WHOLE: tl.constexpr = SIZE % BLOCK == 0
        for start in tl.range(0, SIZE, BLOCK, num_stages=STAGES):
            vectors = loaded(x_pointers + start, (start + columns < SIZE)[:, None], IS_WHOLE)
            total = add_products(total, weight, codes, lines, start, vectors, SIZE, BLOCK, LAYOUT, IS_WHOLE)
            if IS_GATED:
                up = add_products(up, weight, codes, lines + NUM_OUTPUTS, start, vectors, SIZE, BLOCK, LAYOUT, IS_WHOLE)
        if bias is not None:
            total += tl.load(bias + lines).to(tl.float32)[:, None]
            if IS_GATED:
                up += tl.load(bias + lines + NUM_OUTPUTS).to(tl.float32)[:, None]
        if IS_GATED:
            result = _activate(total, up, GATE, out.dtype.element_ty)
            targets = rows
        else:
            result = total.to(out.dtype.element_ty)
            targets = pairs
        is_inside = is_row[None, :] & (outputs < NUM_OUTPUTS)[:, None]
        tl.store(out + targets.to(tl.int64)[None, :] * NUM_OUTPUTS + outputs[:, None], result, mask=is_inside)


@kernel()
def _vector_gated_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, offsets: tl.tensor, zeros: tl.tensor, table: tl.tensor,
    num_lines: tl.tensor, bias: tl.tensor, out: tl.tensor, experts: tl.tensor, num_outputs: tl.tensor,
    SIZE: tl.constexpr, TOP_K: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
    GATE: tl.constexpr, LAYOUT: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a block of outputs of one pair: x [T, D] -> activated [P, F]."""
    codes = scales, offsets, zeros, table, num_lines
    pair = tl.program_id(1)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < num_outputs
    vector = x + (pair // TOP_K).to(tl.int64) * SIZE
    wait_and_start_next()
    expert = tl.load(experts + pair).to(tl.int64)
    lines = expert * (2 * num_outputs) + outputs
    gate, up = vector_zeros(OUTPUTS, BLOCK, LAYOUT), vector_zeros(OUTPUTS, BLOCK, LAYOUT)
    for start in tl.range(0, SIZE, BLOCK, loop_unroll_factor=UNROLL):
        parts = vector_parts(vector, is_output, start, SIZE, BLOCK, LAYOUT)
        gate += vector_products(weight, codes, lines, is_output, start, parts, SIZE, BLOCK, LAYOUT)
        up += vector_products(weight, codes, lines + num_outputs, is_output, start, parts, SIZE, BLOCK, LAYOUT)
    gate_sum, up_sum = line_sums(gate), line_sums(up)
    if bias is not None:
        gate_sum += tl.load(bias + lines, mask=is_output, other=0.0).to(tl.float32)
        up_sum += tl.load(bias + lines + num_outputs, mask=is_output, other=0.0).to(tl.float32)
    result = _activate(gate_sum, up_sum, GATE, out.dtype.element_ty)
    tl.store(out + pair.to(tl.int64) * num_outputs + outputs, result, mask=is_output)


@triton.jit
def _with_shared(
    total: tl.tensor, shared: tl.tensor, gates: tl.tensor, token: tl.tensor, places: tl.tensor, is_inside: tl.tensor
) -> tl.tensor:
    """Return total [N] plus the shared experts' output for the token, multiplied by its gate, if there is one."""
    if shared is not None:
        more = tl.load(shared + places, mask=is_inside, other=0.0).to(tl.float32)
        if gates is not None:
            more = more / (1.0 + tl.exp(-tl.load(gates + token).to(tl.float32)))
        total += more
    return total


@kernel()
def _vector_down_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, offsets: tl.tensor, zeros: tl.tensor, table: tl.tensor,
    num_lines: tl.tensor, bias: tl.tensor, out: tl.tensor, experts: tl.tensor, pair_weights: tl.tensor,
    shared: tl.tensor, gates: tl.tensor, num_outputs: tl.tensor,
    SIZE: tl.constexpr, TOP_K: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
    LAYOUT: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a block of outputs of one token, the weighted sum over its experts: x [P, F] -> [T, D]."""
    codes = scales, offsets, zeros, table, num_lines
    token = tl.program_id(1)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < num_outputs
    wait_and_start_next()
    total = tl.zeros((OUTPUTS,), tl.float32)
    lines, factors = (), ()
    for index in tl.static_range(TOP_K):
        expert = tl.load(experts + token * TOP_K + index).to(tl.int64)
        factors += (tl.load(pair_weights + token * TOP_K + index),)
        lines += (expert * num_outputs + outputs,)
        if bias is not None:
            total += tl.load(bias + lines[index], mask=is_output, other=0.0).to(tl.float32) * factors[index]
    vectors = x + token.to(tl.int64) * (TOP_K * SIZE)
    products = vector_zeros(OUTPUTS, BLOCK, LAYOUT)
    for start in tl.range(0, SIZE, BLOCK, loop_unroll_factor=UNROLL):
        for index in tl.static_range(TOP_K):
            parts = vector_parts(vectors + index * SIZE, is_output, start, SIZE, BLOCK, LAYOUT)
            if LAYOUT is None:
                parts = (parts[0] * factors[index],)
            own = vector_products(weight, codes, lines[index], is_output, start, parts, SIZE, BLOCK, LAYOUT)
            products += own if LAYOUT is None else own * factors[index]
    total += line_sums(products)
    places = token.to(tl.int64) * num_outputs + outputs
    total = _with_shared(total, shared, gates, token, places, is_output)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=is_output)


@kernel()
def _sum_kernel(
    parts: tl.tensor, pair_weights: tl.tensor, out: tl.tensor, shared: tl.tensor, gates: tl.tensor,
    num_outputs: tl.tensor, TOP_K: tl.constexpr, OUTPUTS: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a block of outputs of one token, the weighted sum of its pairs: parts [P, D] -> [T, D]."""
    token = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < num_outputs
    wait_and_start_next()
    own = parts + token * TOP_K * num_outputs + outputs
    total = tl.zeros((OUTPUTS,), tl.float32)
    for index in tl.static_range(TOP_K):
        part = tl.load(own + index * num_outputs, mask=is_output, other=0.0).to(tl.float32)
        total += part * tl.load(pair_weights + token * TOP_K + index)
    places = token * num_outputs + outputs
    total = _with_shared(total, shared, gates, token, places, is_output)
    tl.store(out + places, total.to(out.dtype.element_ty), mask=is_output)


MAX_VECTOR_TOKENS = 4
"""Up to this number of tokens, each pair reads its expert separately, because few pairs share an expert."""
FP32 = Tile(16, 32, 32, 2, 4)
"""The tile for fp32, which runs without tensor cores."""
INVARIANT = Tile(64, 64, 64, 4, 4)
"""The tile for batch-invariant results."""
TILES = (
    (8, Tile(16, 64, 128, 3, 4), Tile(16, 64, 128, 3, 4)),
    (20, Tile(32, 64, 64, 5, 4), Tile(32, 128, 64, 3, 4)),
    (48, Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 3, 4)),
    (math.inf, Tile(128, 128, 64, 4, 8), Tile(128, 256, 64, 3, 8)),
)
"""(maximum average pairs per expert, tile of the first matmul, tile of the second). Both tiles have the same number of
rows. The fastest on an H200 for the sizes of Qwen3-30B-A3B; among the fastest for gpt-oss-20b and Qwen3-Next-80B.
"""
VECTOR_PARTS = 48
"""Maximum pieces of 256 weights that a program loads per iteration with few tokens. Chosen for the same models."""


CODE_TILES = (
    (8, Tile(16, 64, 64, 5, 4), Tile(16, 64, 64, 5, 4)),
    (40, Tile(32, 64, 64, 4, 4), Tile(32, 128, 64, 4, 8)),
    (math.inf, Tile(64, 128, 64, 4, 8), Tile(64, 128, 64, 4, 8)),
)
"""As ``TILES``, for codes; the fastest on an H200 for gpt-oss-20b in MXFP4."""
MANY_PAIRS = 256
"""With more pairs per expert on average, a matrix of codes is dequantized first."""
MAX_WIDE_BYTES = 5 << 30
"""Maximum size of a matrix that is dequantized at once."""


def tiles_for(
    num_pairs: int, num_experts: int, dtype: torch.dtype, *, batch_invariant: bool, is_coded: bool = False
) -> tuple[Tile, Tile]:
    """Return the tiles of both matmuls. They have the same number of rows."""
    if dtype == torch.float32:
        return FP32, FP32
    if batch_invariant:
        return INVARIANT, INVARIANT
    tiles = CODE_TILES if is_coded else TILES
    return next((first, second) for max_pairs, first, second in tiles if num_pairs <= max_pairs * num_experts)


def compute(
    x: Tensor, chosen: ChosenExperts, weights: DeviceWeights, shared: SharedOutputs | None, *, batch_invariant: bool
) -> Tensor:
    """Compute ``kernels.experts.DeviceExperts`` for contiguous x [T, D] -> [T, D]."""
    if x.shape[0] <= MAX_VECTOR_TOKENS and not batch_invariant:
        return multiply_vectors_down(multiply_vectors(x, chosen, weights), chosen, weights, shared)
    num_experts, num_pairs = weights.num_experts, chosen.experts.numel()
    is_coded = isinstance(weights.down, DeviceCodes)
    if num_pairs > MANY_PAIRS * num_experts and x.dtype != torch.float32 and not batch_invariant:
        # Dequantize the matrices first, unless the larger one (gate and up) would be too large.
        is_coded &= 2 * math.prod(weights.down.shape) * x.dtype.itemsize > MAX_WIDE_BYTES
    first, second = tiles_for(num_pairs, num_experts, x.dtype, batch_invariant=batch_invariant, is_coded=is_coded)
    tiling = align(chosen, num_experts=num_experts, rows=first.rows)

    def matrix(codes: Tensor | DeviceCodes) -> Tensor | DeviceCodes:
        """Dequantize codes [E * O, I] -> [E, O, I], if there are many pairs."""
        if is_coded or not isinstance(codes, DeviceCodes):
            return codes
        return dequantize(codes, x.dtype).view(num_experts, -1, codes.shape[1])

    size, inner_size = x.shape[1], weights.down.shape[-1]
    gated = _multiply_tiles(x, matrix(weights.gate_up), weights.gate_up_bias, tiling, first, inner_size, weights.gate)
    parts = _multiply_tiles(gated, matrix(weights.down), weights.down_bias, tiling, second, size, None)
    return add_up(parts, shared, tiling)


def _multiply_tiles(
    x: Tensor,
    weight: Tensor | DeviceCodes,
    bias: Tensor | None,
    tiling: Tiling,
    tile: Tile,
    num_outputs: int,
    gate: GateFunction | None,
) -> Tensor:
    """x [T, D] -> activated [P, F], in the order of the tiling; or x [P, F] in this order -> [P, D], in order of pairs.

    gate: the gate function if the weight has gates.
    """
    stored, size = stored_weight(weight), weight.shape[-1]
    num_pairs, top_k = len(tiling.order), tiling.chosen.experts.shape[1]
    out = torch.empty((num_pairs, num_outputs), dtype=x.dtype, device=x.device)
    max_tiles = tiling.tiles.shape[1]
    tensors = x, *stored.arguments, bias, out, tiling.order, tiling.tiles, tiling.num_tiles
    block = piece_of(size) if stored.layout is not None and stored.layout.per_word == 4 else tile.block
    sizes = num_outputs, size, top_k, tile.rows, tile.outputs, block, tile.stages
    arguments = (*tensors, max_tiles, *sizes, gate, stored.layout)
    key = x.dtype, *stored.key, tile, top_k, gate, bias is None, *alignments(x)
    _tiled_kernel((max_tiles * -(-num_outputs // tile.outputs), 1, 1), key, arguments, options(tile.warps))
    return out


def add_up(parts: Tensor, shared: SharedOutputs | None, tiling: Tiling) -> Tensor:
    """Return the weighted sum [T, D] of the pairs [P, D] of each token, plus the outputs of shared experts."""
    (num_tokens, top_k), num_outputs = tiling.chosen.experts.shape, parts.shape[1]
    out = parts.new_empty((num_tokens, num_outputs))
    block = 1024 if num_tokens > 64 else 512
    arguments = (parts, tiling.chosen.weights, out, *(shared or (None, None)), num_outputs, top_k, block)
    key = parts.dtype, num_outputs, top_k, block, *alignments(*(shared or ()))
    _sum_kernel((num_tokens, -(-num_outputs // block), 1), key, arguments, options(4))
    return out


class VectorPrograms(NamedTuple):
    """Outputs, inputs per block, blocks per iteration and warps of a program that multiplies vectors.

    Each warp loads x for its own lines: sharing x would need a barrier.
    """

    outputs: int
    block: int
    unroll: int
    warps: int


VECTOR_CODES = VectorPrograms(4, 1024, 1, 4)
"""The programs for codes."""


@lru_cache(maxsize=64)
def programs_for(size: int, num_matrices: int, block: int) -> VectorPrograms:
    """Return the programs for lines of ``size`` elements of ``num_matrices`` matrices, loaded in blocks."""
    num_blocks = -(-size // block)
    num_rounds = -(-num_blocks * num_matrices * block // (256 * VECTOR_PARTS))
    return VectorPrograms(4, block, -(-num_blocks // num_rounds), 4)


def multiply_vectors(x: Tensor, chosen: ChosenExperts, weights: DeviceWeights) -> Tensor:
    """x [T, D] -> activated [P, F], in the order of pairs."""
    stored, bias = stored_weight(weights.gate_up), weights.gate_up_bias
    num_outputs, size, (num_tokens, top_k) = weights.down.shape[-1], x.shape[1], chosen.experts.shape
    programs = programs_for(size, 2, 512) if stored.layout is None else VECTOR_CODES
    outputs, block, unroll, num_warps = programs
    out = x.new_empty((num_tokens * top_k, num_outputs))
    sizes = num_outputs, size, top_k, outputs, block, unroll
    arguments = (x, *stored.arguments, bias, out, chosen.experts, *sizes, weights.gate, stored.layout)
    key = x.dtype, *stored.key, num_outputs, programs, top_k, weights.gate, bias is None, *alignments(x)
    _vector_gated_kernel((-(-num_outputs // outputs), num_tokens * top_k, 1), key, arguments, options(num_warps))
    return out


def multiply_vectors_down(
    x: Tensor, chosen: ChosenExperts, weights: DeviceWeights, shared: SharedOutputs | None
) -> Tensor:
    """x [P, F] -> [T, D], plus the outputs of shared experts."""
    stored, bias = stored_weight(weights.down), weights.down_bias
    num_outputs, size, (num_tokens, top_k) = weights.gate_up.shape[-1], x.shape[1], chosen.experts.shape
    programs = programs_for(size, top_k, 256) if stored.layout is None else VECTOR_CODES
    outputs, block, unroll, num_warps = programs
    out = x.new_empty((num_tokens, num_outputs))
    sizes = num_outputs, size, top_k, outputs, block, unroll
    arguments = (x, *stored.arguments, bias, out, *chosen, *(shared or (None, None)), *sizes, stored.layout)
    key = x.dtype, *stored.key, num_outputs, programs, top_k, bias is None, *alignments(*(shared or ()))
    _vector_down_kernel((-(-num_outputs // outputs), num_tokens, 1), key, arguments, options(num_warps))
    return out
