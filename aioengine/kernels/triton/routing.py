"""Routing of tokens to experts on a GPU, without synchronizing with the host, and grouping of pairs into tiles.

``_route_kernel`` has a program for each token. ``_align_kernel`` has a program for each expert, or for each expert and
block of pairs: it finds the pairs of this expert. The order of pairs is always the same.

T tokens, E experts, K experts per token, P = T * K (token, expert) pairs. Pair p belongs to token p // K. A tile has up
to ``rows`` pairs of one expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.families._experts import RouterConfig
from aioengine.kernels.expert_types import ChosenExperts
from aioengine.kernels.triton.dependent import wait_and_start_next
from aioengine.kernels.triton.launcher import alignments, dtypes, kernel, next_power_of_2, options

FEW_PAIRS = 2048
"""Up to this number of pairs, each program of ``_align_kernel`` counts all pairs. More pairs are counted in blocks by
``_count_kernel``, and ``_align_kernel`` has a program for each block and expert.
"""
BLOCK_OF_FEW, BLOCK_OF_MANY = 1024, 4096
"""Maximum number of pairs that a program loads at once."""
COUNTS_AT_A_TIME = 8192
"""Maximum number of counts that a program loads at once."""
COLUMNS = 3
"""Numbers per tile: expert, start and end of its pairs in ``Tiling.order``."""


@kernel()
def _route_kernel(
    logits: tl.tensor, bias: tl.tensor, experts: tl.tensor, weights: tl.tensor,
    NUM_GROUPS: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr, PLACES: tl.constexpr,
    TOP_K: tl.constexpr, LANES: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr, SCALE: tl.constexpr,
    IS_SIGMOID: tl.constexpr, IS_NORMALIZED: tl.constexpr,
) -> None:  # fmt: skip
    """Compute ``route`` for one token.

    NUM_GROUPS, SIZE: groups, and experts of a group; GROUPS, PLACES: both padded. LANES: TOP_K, padded.
    """
    token = tl.program_id(0).to(tl.int64)
    groups, places = tl.arange(0, GROUPS)[:, None], tl.arange(0, PLACES)[None, :]
    numbers = groups * SIZE + places
    is_expert = (groups < NUM_GROUPS) & (places < SIZE)
    wait_and_start_next()
    scores = tl.load(logits + token * (NUM_GROUPS * SIZE) + numbers, mask=is_expert, other=float("-inf"))
    scores = scores.to(tl.float32)
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    else:
        scores = tl.exp(scores - tl.max(scores))
        scores = scores / tl.sum(scores)
    chosen_by = scores
    if bias is not None:
        chosen_by += tl.load(bias + numbers, mask=is_expert, other=0.0).to(tl.float32)
    chosen_by = tl.where(is_expert, chosen_by, float("-inf"))
    if NUM_GROUPS > 1:
        rest, sums = chosen_by, tl.zeros((GROUPS,), tl.float32)
        for _ in tl.static_range(GROUP_TOP):
            best, place = tl.max(rest, 1, return_indices=True)
            sums += best
            rest = tl.where(places == place[:, None], float("-inf"), rest)
        is_kept = tl.zeros((GROUPS,), tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            is_best = tl.arange(0, GROUPS) == tl.argmax(sums, 0)
            is_kept = tl.where(is_best, 1, is_kept)
            sums = tl.where(is_best, float("-inf"), sums)
        chosen_by = tl.where(is_kept[:, None] > 0, chosen_by, float("-inf"))
    chosen_by, scores = tl.reshape(chosen_by, (GROUPS * PLACES,)), tl.reshape(scores, (GROUPS * PLACES,))
    lanes = tl.arange(0, LANES)
    chosen, chosen_weights = tl.zeros((LANES,), tl.int32), tl.zeros((LANES,), tl.float32)
    for index in tl.static_range(TOP_K):
        weight, place = tl.max(chosen_by, 0, return_indices=True)  # ties go to the first
        is_best = tl.arange(0, GROUPS * PLACES) == place
        if bias is not None:
            weight = tl.sum(tl.where(is_best, scores, 0.0))
        chosen_by = tl.where(is_best, float("-inf"), chosen_by)
        chosen = tl.where(lanes == index, place // PLACES * SIZE + place % PLACES, chosen)
        chosen_weights = tl.where(lanes == index, weight, chosen_weights)
    if IS_NORMALIZED:
        chosen_weights = chosen_weights / (tl.sum(chosen_weights) + 1e-20)
    tl.store(experts + token * TOP_K + lanes, chosen, mask=lanes < TOP_K)
    tl.store(weights + token * TOP_K + lanes, chosen_weights * SCALE, mask=lanes < TOP_K)


@triton.jit
def _counted(
    experts: tl.tensor, start: tl.tensor, num_pairs: tl.tensor, BINS: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Return [BINS], the number of pairs of each expert in a block."""
    pairs = start + tl.arange(0, BLOCK)
    inside = pairs < num_pairs
    return tl.histogram(tl.load(experts + pairs, mask=inside, other=0), BINS, mask=inside)


@kernel(do_not_specialize=["num_pairs"])
def _count_kernel(
    experts: tl.tensor, counts: tl.tensor, num_pairs: tl.tensor, BINS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Count the pairs of each expert in one block. counts: [blocks, BINS]."""
    block = tl.program_id(0)
    wait_and_start_next()
    tl.store(counts + block * BINS + tl.arange(0, BINS), _counted(experts, block * BLOCK, num_pairs, BINS, BLOCK))


@kernel(do_not_specialize=["num_pairs", "max_tiles"])
def _align_kernel(
    experts: tl.tensor, counted: tl.tensor, order: tl.tensor, tiles: tl.tensor, num_tiles: tl.tensor,
    num_pairs: tl.tensor, max_tiles: tl.tensor, BINS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    IS_COUNTED: tl.constexpr, COUNTS: tl.constexpr,
) -> None:  # fmt: skip
    """Store the pairs of one expert in a block, and in the first block its tiles. BINS: the experts, padded.

    IS_COUNTED: ``counted`` are the results of ``_count_kernel``. Otherwise there is one block, and each program counts.
    """
    expert, own_block = tl.program_id(0), tl.program_id(1)
    wait_and_start_next()
    bins = tl.arange(0, BINS)
    counts, before = tl.zeros((BINS,), tl.int32), tl.zeros((BINS,), tl.int32)  # before: in the blocks before this one
    if IS_COUNTED:
        num_blocks = tl.cdiv(num_pairs, BLOCK)
        for start in range(0, num_blocks, COUNTS):
            blocks = (start + tl.arange(0, COUNTS))[:, None]
            numbers = tl.load(counted + blocks * BINS + bins[None, :], mask=blocks < num_blocks, other=0)
            counts += tl.sum(numbers, 0)
            before += tl.sum(tl.where(blocks < own_block, numbers, 0), 0)
    else:
        for start in range(0, num_pairs, BLOCK):
            counts += _counted(experts, start, num_pairs, BINS, BLOCK)
    needed = (counts + (ROWS - 1)) // ROWS
    first = tl.sum(tl.where(bins < expert, counts, 0))
    if own_block == 0:
        if expert == 0:
            tl.store(num_tiles, tl.sum(needed))
        count = tl.sum(tl.where(bins == expert, counts, 0))
        tile = tl.sum(tl.where(bins < expert, needed, 0))
        for begin in range(0, count, ROWS):
            tl.store(tiles + tile, expert)
            tl.store(tiles + max_tiles + tile, first + begin)
            tl.store(tiles + 2 * max_tiles + tile, first + tl.minimum(begin + ROWS, count))
            tile += 1
    first += tl.sum(tl.where(bins == expert, before, 0))
    end = (own_block + 1) * BLOCK if IS_COUNTED else num_pairs
    for start in range(own_block * BLOCK, end, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        is_own = (tl.load(experts + pairs, mask=pairs < num_pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + first + tl.cumsum(is_own, 0) - 1, pairs, mask=is_own > 0)
        first += tl.sum(is_own)


def route(logits: Tensor, bias: Tensor | None, top_k: int, router: RouterConfig) -> ChosenExperts:
    """Compute ``kernels.routing.route`` for contiguous logits [T, E] and bias [E]."""
    num_tokens, num_experts = logits.shape
    shape = num_tokens, top_k
    experts = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    size = num_experts // router.num_groups
    groups = router.num_groups, size, next_power_of_2(router.num_groups), next_power_of_2(size)
    counts = top_k, next_power_of_2(top_k), router.top_groups, router.group_top
    rules = router.scale, router.scoring == "sigmoid", router.is_normalized
    arguments = (logits, bias, experts, weights, *groups, *counts, *rules)
    key = *dtypes(logits, bias), num_experts, top_k, router, *alignments(logits, bias)
    _route_kernel((num_tokens, 1, 1), key, arguments, options(1))
    return ChosenExperts(experts, weights)


class Tiling(NamedTuple):
    """Pairs grouped into tiles. M: maximum number of tiles for P pairs.

    Attributes:
        order: [P] int32, the pairs sorted by expert, then by index.
        tiles: [3, M] int32: expert, start and end of the pairs in ``order``.
        num_tiles: [1] int32, the number of tiles; the rest of ``tiles`` is undefined.
        chosen: the experts and weights of the pairs.
    """

    order: Tensor
    tiles: Tensor
    num_tiles: Tensor
    chosen: ChosenExperts


def max_num_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """Return the maximum number of tiles of up to ``rows`` pairs: only the last tile of each expert is not full."""
    num_used = min(num_pairs, num_experts)
    return num_used + (num_pairs - num_used) // rows


def align(chosen: ChosenExperts, *, num_experts: int, rows: int) -> Tiling:
    """Group the pairs into tiles of up to ``rows`` pairs of one expert."""
    experts = chosen.experts
    num_pairs = experts.numel()
    max_tiles = max_num_tiles(num_pairs, num_experts, rows)
    order, tiles, num_tiles = (experts.new_empty(shape) for shape in (num_pairs, (COLUMNS, max_tiles), 1))
    bins = next_power_of_2(num_experts)
    is_counted = num_pairs > FEW_PAIRS
    block = BLOCK_OF_MANY if num_pairs > 4 * BLOCK_OF_MANY else min(max(next_power_of_2(num_pairs), 16), BLOCK_OF_FEW)
    num_warps = 8 if block == BLOCK_OF_MANY else 4
    key = num_experts, is_counted, block, experts.data_ptr() % 16
    counted, num_blocks = experts, 1
    if is_counted:
        num_blocks = -(-num_pairs // block)
        counted = experts.new_empty((num_blocks, bins))
        arguments = experts, counted, num_pairs, bins, block
        _count_kernel((num_blocks, 1, 1), key, arguments, options(num_warps))
    numbers = num_pairs, max_tiles, bins, rows, block, is_counted, max(COUNTS_AT_A_TIME // bins, 1)
    arguments = (experts, counted, order, tiles, num_tiles, *numbers)
    _align_kernel((num_experts, num_blocks, 1), (*key, rows), arguments, options(num_warps))
    return Tiling(order, tiles, num_tiles, chosen)
