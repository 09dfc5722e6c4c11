"""Attention of prompts on Hopper GPUs in 16 bits, with the bits of ``attention.py``.

One warp of a program loads keys, one loads values, and two groups of warps compute half of the query rows each. While
tensor cores multiply the weights of a block by its values, a group computes the weights of the next block, and tensor
cores also work for the other group.

The kernel is written in Gluon, a part of Triton in which layouts and waits are explicit. Gluon has no interpreter.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from aioengine.kernels.triton.attention import LARGE, ONES, PagedRows, Pool, tokens_of
from aioengine.kernels.triton.launcher import KernelLauncher, alignments
from aioengine.kernels.triton.scores import MASKED, NO_RULES, ScoreRules, merged

OPTIONS = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": False}
"""For a group that computes. With 168 registers per thread on average, these groups can have 240."""
BLOCK = gl.constexpr(LARGE)
"""Query rows of a tile, positions of a block, and size of a head."""
ROWS = gl.constexpr(LARGE // 2)
"""Query rows of a group of warps."""
COLUMNS = gl.constexpr(64)
"""Columns of a box of keys or values: 128 bytes."""
STAGES = gl.constexpr(2)
"""Blocks of keys, and of values, in shared memory."""
# layouts of keys, values, queries and weights in shared memory, and of sums and other tensors in registers
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LARGE, 16]))
TOTALS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ONES.value, 16]))
ROW = gl.constexpr(gl.SliceLayout(1, SUMS.value))
COLUMN = gl.constexpr(gl.SliceLayout(0, SUMS.value))
LOADED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
BOX = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


class _Sizes(NamedTuple):
    """Constants of the kernel. box: positions that are loaded at a time, on one page."""

    token_stride: int
    num_heads: int
    num_kv_heads: int
    group: int
    page_size: int
    box: int


@gluon.jit
def _load(
    source: tl.tensor, memory: tl.tensor, barriers: tl.tensor, page_ids: tl.tensor, stop: tl.tensor,
    SIDE: gl.constexpr, SIZES: gl.constexpr,
) -> None:  # fmt: skip
    """Load the keys (SIDE 0) or values (1) of positions up to ``stop``, as soon as there is space."""
    BOXES: gl.constexpr = BLOCK // SIZES.box
    for done in range(gl.cdiv(stop, BLOCK)):
        stage = 2 * SIDE * STAGES + done % STAGES
        mbarrier.wait(barriers.index(stage + STAGES), done // STAGES + 1 & 1)
        mbarrier.expect(barriers.index(stage), BLOCK * BLOCK * 2)
        for box in gl.static_range(BOXES):
            position = done * BLOCK + box * SIZES.box
            page = gl.load(page_ids + position // SIZES.page_size, mask=position < stop, other=-1)  # -1: zeros
            place = (page * SIZES.num_kv_heads + gl.program_id(0)) * SIZES.page_size + position % SIZES.page_size
            for half in gl.static_range(2):
                target = ((SIDE * STAGES + done % STAGES) * 2 + half) * BOXES + box
                tma.async_copy_global_to_shared(
                    source, [place, half * COLUMNS], barriers.index(stage), memory.index(target)
                )


@gluon.jit
def _clean(memory: tl.tensor, barriers: tl.tensor, done: tl.tensor, end: tl.tensor, SIZE: gl.constexpr) -> None:
    """Zero the values from position ``end`` to the end of its box. They have weight 0, but may be NaN."""
    if end % SIZE > 0:
        stage = done % STAGES
        mbarrier.wait(barriers.index(2 * STAGES + stage), done // STAGES & 1)
        is_there = gl.arange(0, SIZE, gl.SliceLayout(1, BOX))[:, None] < end % SIZE
        for half in gl.static_range(2):
            box = memory.index(((STAGES + stage) * 2 + half) * (BLOCK // SIZE) + end % BLOCK // SIZE)
            values = box.load(BOX)
            box.store(gl.where(is_there, values, gl.zeros_like(values)))
        fence_async_shared()


@gluon.jit
def _start_scores(queries: tl.tensor, blocks: tl.tensor, barriers: tl.tensor, done: tl.tensor) -> tl.tensor:
    """Start to multiply the queries by the keys of a block. done: number of blocks before it."""
    mbarrier.wait(barriers.index(done % STAGES), done // STAGES & 1)
    zeros = gl.zeros((ROWS, BLOCK), gl.float32, SUMS)
    keys = blocks.index(done % STAGES).permute((1, 0))
    return warpgroup_mma(queries, keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_sums(
    weights: tl.tensor, ones: tl.tensor, blocks: tl.tensor, barriers: tl.tensor, done: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Start to add the weights of a block, and to multiply them by its values."""
    mbarrier.wait(barriers.index(2 * STAGES + done % STAGES), done // STAGES & 1)
    zeros = gl.zeros((ROWS, BLOCK), gl.float32, SUMS)
    no_totals = gl.zeros((ROWS, ONES), gl.float32, TOTALS)
    totals = warpgroup_mma(weights, ones, no_totals, use_acc=False, is_async=True)
    return totals, warpgroup_mma(weights, blocks.index(STAGES + done % STAGES), zeros, use_acc=False, is_async=True)


@gluon.jit
def _weights_of(
    scores: tl.tensor, first: tl.tensor, last: tl.tensor, all_see: tl.tensor, scale: tl.tensor, dtype: gl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the highest score of each query row in the block of positions from ``first``, and the weights."""
    if first + BLOCK > all_see:
        positions = first + gl.arange(0, BLOCK, COLUMN)
        scores = gl.where(positions[None, :] <= last[:, None], scores, float("-inf"))
    highest = gl.maximum(gl.max(scores, 1) * scale, MASKED)
    factors = gl.full(scores.shape, 0.0, gl.float32, SUMS) + scale
    return highest, gl.exp2(gl.fma(scores, factors, tl.broadcast_to(-highest[:, None], scores.shape))).to(dtype)


@gluon.jit
def _with_block(state: tl.tuple, highest: tl.tensor, totals: tl.tensor, sums: tl.tensor) -> tl.tuple:
    """Merge the next block into the state of the previous blocks."""
    return merged(state, (highest, gl.convert_layout(gl.max(totals, 1), ROW), sums))


@gluon.jit
def _attend(
    q: tl.tensor, out: tl.tensor, queries: tl.tensor, weights: tl.tensor, shared: tl.tuple, tile: tl.tuple,
    scale: tl.tensor,
    SIDE: gl.constexpr, SIZES: gl.constexpr,
) -> None:  # fmt: skip
    """Attend with half of the query rows of a tile."""
    dtype: gl.constexpr = q.dtype.element_ty
    ones, memory, barriers = shared
    start, first_token, count, before, stop = tile
    blocks = memory._reinterpret(dtype, [2 * STAGES, BLOCK, BLOCK], SHARED)
    members = SIDE * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
    tokens = start + members // SIZES.group
    is_member = (tokens < count) & (members < BLOCK // SIZES.group * SIZES.group)
    heads = gl.program_id(0) * SIZES.group + members % SIZES.group
    places = (first_token + tokens).to(gl.int64) * SIZES.token_stride + heads * BLOCK
    columns = gl.arange(0, BLOCK, gl.SliceLayout(0, LOADED))
    queries.store(gl.load(q + places[:, None] + columns[None, :], mask=is_member[:, None], other=0.0))
    fence_async_shared()

    members = SIDE * ROWS + gl.arange(0, ROWS, ROW)
    tokens = start + members // SIZES.group
    last, all_see = before + gl.minimum(tokens, count - 1), before + start + 1
    sums = gl.zeros((ROWS, BLOCK), gl.float32, SUMS)
    state = gl.full((ROWS,), MASKED, gl.float32, ROW), gl.zeros((ROWS,), gl.float32, ROW), sums
    done = gl.to_tensor(0)
    scores = warpgroup_mma_wait(0, [_start_scores(queries, blocks, barriers, done)])
    mbarrier.arrive(barriers.index(STAGES), count=1)
    highest, next_weights = _weights_of(scores, 0, last, all_see, scale, dtype)
    weights.store(next_weights)
    fence_async_shared()
    for first in range(BLOCK, stop, BLOCK):
        scores = _start_scores(queries, blocks, barriers, done + 1)
        totals, sums = _start_sums(weights, ones, blocks, barriers, done)
        scores = warpgroup_mma_wait(2, [scores])
        mbarrier.arrive(barriers.index(STAGES + (done + 1) % STAGES), count=1)
        next_highest, next_weights = _weights_of(scores, first, last, all_see, scale, dtype)
        # without this, the compiler would move the next wait before the computation of the weights
        mbarrier.wait(barriers.index((done + 2) % STAGES), (done + 2) // STAGES & 1, pred=first + BLOCK < stop)
        totals, sums = warpgroup_mma_wait(0, [totals, sums])
        mbarrier.arrive(barriers.index(3 * STAGES + done % STAGES), count=1)
        done += 1
        weights.store(next_weights)
        fence_async_shared()
        state = _with_block(state, highest, totals, sums)
        highest = next_highest
    _clean(memory, barriers, done, stop, SIZES.box)
    totals, sums = warpgroup_mma_wait(0, _start_sums(weights, ones, blocks, barriers, done))
    _, total, sums = _with_block(state, highest, totals, sums)
    is_member = (tokens < count) & (members < BLOCK // SIZES.group * SIZES.group)
    heads = gl.program_id(0) * SIZES.group + members % SIZES.group
    targets = ((first_token + tokens).to(gl.int64) * SIZES.num_heads + heads) * BLOCK
    attended = (sums / total[:, None]).to(dtype)
    gl.store(out + targets[:, None] + gl.arange(0, BLOCK, COLUMN)[None, :], attended, mask=is_member[:, None])


@gluon.jit(do_not_specialize_on_alignment=["query_starts", "page_starts", "last_lengths", "page_ids", "tiles"])
def _prompt_kernel(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, query_starts: tl.tensor, page_starts: tl.tensor,
    last_lengths: tl.tensor, page_ids: tl.tensor, tiles: tl.tensor, out: tl.tensor, scale: tl.tensor,
    SIZES: gl.constexpr,
) -> None:  # fmt: skip
    """Attend with the query rows of one tile, for the heads of one kv head. Start its groups of warps."""
    start, first_token, count, first_page, length = tokens_of(
        tiles, gl.program_id(1), query_starts, page_starts, last_lengths, SIZES.page_size
    )
    stop = length - count + gl.minimum(start + BLOCK // SIZES.group, count)
    tile = start, first_token, count, length - count, stop
    dtype: gl.constexpr = q.dtype.element_ty
    memory = gl.allocate_shared_memory(dtype, [4 * STAGES * (BLOCK // SIZES.box), SIZES.box, COLUMNS], SHARED)
    queries = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK], SHARED)
    weights = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK], SHARED)
    one = gl.full((ONES, BLOCK), 1.0, dtype, LOADED)
    ones = gl.allocate_shared_memory(dtype, [ONES, BLOCK], SHARED, one).permute((1, 0))
    fence_async_shared()
    # whether each block of keys is full, and empty, and each block of values
    barriers = gl.allocate_shared_memory(gl.int64, [4 * STAGES, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(4 * STAGES):
        mbarrier.init(barriers.index(index), count=1 + index // STAGES % 2)
    shared = ones, memory, barriers
    gl.warp_specialize(
        [
            (_attend, (q, out, queries.index(0), weights.index(0), shared, tile, scale, 0, SIZES)),
            (_attend, (q, out, queries.index(1), weights.index(1), shared, tile, scale, 1, SIZES)),
            (_load, (keys, memory, barriers, page_ids + first_page, stop, 0, SIZES)),
            (_load, (values, memory, barriers, page_ids + first_page, stop, 1, SIZES)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


_attend_prompts = KernelLauncher(_prompt_kernel)


def supports(q: Tensor, pool: Pool, rules: ScoreRules) -> bool:
    """Return whether ``attend`` supports queries [T, H, E], keys [N, K, S, E], values [N, K, S, V], and these rules."""
    keys, values = pool
    num_kv_heads, page_size, head_size = keys.shape[1:]
    is_plain = rules == NO_RULES and keys.dtype == q.dtype and keys.shape == values.shape
    has_boxes = page_size >= 8 and page_size & (page_size - 1) == 0
    fits = q.itemsize == 2 and head_size == LARGE and q.shape[1] // num_kv_heads <= LARGE
    return is_plain and has_boxes and fits


def attend(q: Tensor, pool: Pool, rows: PagedRows, tiles: Tensor, *, scale: float, out: Tensor) -> None:
    """Compute ``attention.attend`` for q [T, H, E], and tiles of tokens of up to ``MAX_SHORT_LENGTH`` positions: with
    splits of more than one block, registers would not suffice.
    """
    num_heads, (num_pages, num_kv_heads, page_size, head_size) = q.shape[1], pool[0].shape
    box = min(page_size, LARGE)
    sizes = _Sizes(q.stride(0), num_heads, num_kv_heads, num_heads // num_kv_heads, page_size, box)
    shape, strides, boxes = [num_pages * num_kv_heads * page_size, head_size], [head_size, 1], [box, COLUMNS.value]
    keys, values = (TensorDescriptor(part, shape, strides, boxes, SHARED.value) for part in pool)
    key = q.dtype, sizes, *alignments(q, out)
    arguments = (q, keys, values, *rows, tiles, out, NO_RULES.factor(scale), sizes)
    _attend_prompts((num_kv_heads, len(tiles), 1), key, arguments, OPTIONS)
