"""Attention of rows of one token, over pages on a GPU.

The positions of a row are divided into splits (split-KV, ``attention/_gpu_splits.py``). A program computes a split for
one kv head: it reads keys and values once for all query heads of this kv head. The program that finishes last merges
the splits of a row in order, so that the sum is the same in every run.

R rows, H query heads, K kv heads, G query heads of a kv head, E head size, N pages, S page size, X entries for splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from aioengine.kernels.triton.dependent import start_next_and_wait
from aioengine.kernels.triton.launcher import KernelLauncher, alignments, has_dependent_launch, next_power_of_2
from aioengine.kernels.triton.scores import (
    MASKED,
    NO_RULES,
    capped,
    merged,
    nothing_attended,
    softmax_step,
    store_split,
    with_sinks,
)

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.kernels.triton.scores import ScoreRules

LEAST_ROWS = 16
"""Rows of the smallest tensor core matmul. Fewer query heads per kv head are padded."""
STAGES = tl.constexpr(3)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The pages of R rows, and their splits; all int32.

    Attributes:
        page_starts: [R + 1] start of each row in ``page_ids``.
        page_ids: the concatenated page tables.
        splits: [5, X], the result of ``attention._gpu_splits.plan_splits``. X is a multiple of 16.
        num_done: [R * K] zeros, which are zeros again after the kernel.
    """

    page_starts: Tensor
    page_ids: Tensor
    splits: Tensor
    num_done: Tensor


@triton.jit
def _attended(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    pages: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    PAGE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the highest score, sum of weights and weighted values of each query over positions begin to end."""
    columns = tl.arange(0, HEAD_SIZE)[None, :]
    highest, total, sums = nothing_attended(queries.shape[0], HEAD_SIZE)
    for first in tl.range(begin, end, BLOCK, num_stages=STAGES):
        positions = first + tl.arange(0, BLOCK)
        inside = positions < end
        page = tl.load(pages + positions // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        offsets = (page * PAGE_STRIDE + positions % PAGE_SIZE * HEAD_SIZE)[:, None] + columns
        scores = tl.dot(queries, tl.trans(tl.load(keys + offsets))) * scale
        if CAP > 0.0:
            scores = capped(scores, CAP)
        weights, shrink, highest, total = softmax_step(tl.where(inside[None, :], scores, MASKED), highest, total)
        # values beyond the end have weight 0, but may be NaN
        block_values = tl.load(values + offsets, mask=inside[:, None], other=0.0)
        sums = tl.dot(weights.to(queries.dtype), block_values, sums * shrink[:, None])
    return highest, total, sums


@triton.jit
def _merge(
    sums: tl.tensor,
    marks: tl.tensor,
    first_source: tl.tensor,
    count: tl.tensor,
    is_member: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the highest score, sum of weights and weighted values over all splits of a row. Loads bypass L1, because
    other programs wrote them.
    """
    columns = tl.arange(0, HEAD_SIZE)[None, :]
    highest, total, whole = nothing_attended(first_source.shape[0], HEAD_SIZE)
    for split in tl.range(0, count, loop_unroll_factor=4):
        source = first_source + split * NUM_HEADS
        split_highest = tl.load(marks + 2 * source, mask=is_member, other=0.0, cache_modifier=".cg")
        split_total = tl.load(marks + 2 * source + 1, mask=is_member, other=1.0, cache_modifier=".cg")
        pointers = sums + source[:, None] * HEAD_SIZE + columns
        split_sums = tl.load(pointers, mask=is_member[:, None], other=0.0, cache_modifier=".cg")
        highest, total, whole = merged(highest, total, whole, split_highest, split_total, split_sums)
    return highest, total, whole


@triton.jit
def _finish(
    out: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    sums: tl.tensor,
    out_heads: tl.tensor,
    is_member: tl.tensor,
    other: tl.tensor,
    other_weights: tl.tensor,
    sinks: tl.tensor,
    HEAD_SIZE: tl.constexpr,
    MERGES: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """Store the attention result, after merging it with ``other`` and with the sinks if there are any."""
    targets = out_heads[:, None] * HEAD_SIZE + tl.arange(0, HEAD_SIZE)[None, :]
    if SINKS:
        highest, total, sums = with_sinks(highest, total, sums, sinks, is_member)
    if MERGES:
        weight = tl.load(other_weights + out_heads, mask=is_member, other=MASKED)
        higher = tl.maximum(highest, weight)
        own, theirs = tl.exp2(highest - higher), tl.exp2(weight - higher)
        total = total * own + theirs
        added = tl.load(other + targets, mask=is_member[:, None], other=0.0).to(tl.float32)
        sums = sums * own[:, None] + added * theirs[:, None]
    tl.store(out + targets, (sums / total[:, None]).to(out.dtype.element_ty), mask=is_member[:, None])


@triton.jit(do_not_specialize_on_alignment=["page_starts", "page_ids", "splits", "num_done"])
def _decode_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    page_starts: tl.tensor,
    page_ids: tl.tensor,
    splits: tl.tensor,
    num_done: tl.tensor,
    sums: tl.tensor,
    marks: tl.tensor,
    out: tl.tensor,
    other: tl.tensor,
    other_weights: tl.tensor,
    sinks: tl.tensor,
    max_splits: tl.tensor,
    scale: tl.tensor,
    TOKEN_STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MERGES: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    head, split = tl.program_id(0), splits + tl.program_id(1)
    row = tl.load(split).to(tl.int64)
    if row >= 0:
        begin, end = tl.load(split + max_splits), tl.load(split + 2 * max_splits)
        count, first_split = tl.load(split + 3 * max_splits), tl.load(split + 4 * max_splits)
        pages = page_ids + tl.load(page_starts + row)
        start_next_and_wait(DEPENDENT)
        members, columns = tl.arange(0, ROWS), tl.arange(0, HEAD_SIZE)[None, :]
        is_member, heads = members < GROUP, head * GROUP + members
        inside = is_member[:, None] & (columns < HEAD_SIZE)
        queries = tl.load(q + row * TOKEN_STRIDE + heads[:, None] * HEAD_SIZE + columns, mask=inside, other=0.0)
        highest, total, attended = _attended(
            *(queries, keys + head * PAGE_SIZE * HEAD_SIZE, values + head * PAGE_SIZE * HEAD_SIZE, pages, begin, end),
            *(scale, NUM_KV_HEADS * PAGE_SIZE * HEAD_SIZE, PAGE_SIZE, HEAD_SIZE, BLOCK, CAP),
        )
        target = (row * (NUM_KV_HEADS * GROUP) + heads, is_member, other, other_weights, sinks + heads)
        if count == 1:
            _finish(out, highest, total, attended, *target, HEAD_SIZE, MERGES, SINKS)
        else:
            split_heads = tl.program_id(1) * (NUM_KV_HEADS * GROUP) + heads
            store_split(sums, marks, split_heads, highest, total, attended, is_member, HEAD_SIZE)
            tl.debug_barrier()  # all threads must have stored before one increments the counter
            done = num_done + row * NUM_KV_HEADS + head
            if tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == count - 1:
                split_heads = first_split * (NUM_KV_HEADS * GROUP) + heads
                whole = _merge(sums, marks, split_heads, count, is_member, NUM_KV_HEADS * GROUP, HEAD_SIZE)
                _finish(out, *whole, *target, HEAD_SIZE, MERGES, SINKS)
                tl.store(done, 0)


_decode = KernelLauncher(_decode_kernel)


def decode(
    q: Tensor,
    pool: tuple[Tensor, Tensor],
    rows: DecodeRows,
    *,
    scale: float,
    out: Tensor,
    other: tuple[Tensor, Tensor] | None = None,
    rules: ScoreRules = NO_RULES,
) -> None:
    """Attend with q [R, H, E] (contiguous heads) to keys and values [N, K, S, E] into ``out`` [R, H, E].

    other: the attention result over further positions, contiguous [R, H, E], and log2 of its sum of exponentials,
    [R, H] fp32. It is merged into the result. A row without such positions has finite numbers and a low logarithm.
    rules: the window must be the one of ``rows.splits``.
    """
    num_heads, head_size = q.shape[1:]
    _, num_kv_heads, page_size, _ = pool[0].shape
    group, max_splits = num_heads // num_kv_heads, rows.splits.shape[1]
    sums = torch.empty(max_splits, num_heads, head_size, dtype=torch.float32, device=q.device)
    stats = torch.empty(max_splits, num_heads, 2, dtype=torch.float32, device=q.device)
    padded = max(next_power_of_2(group), LEAST_ROWS)
    block = 128 if head_size <= 128 else 64
    sizes = q.stride(0), num_kv_heads, group, padded, page_size, head_size, block
    sizes = (*sizes, other is not None, rules.cap, rules.sinks is not None, has_dependent_launch())
    rest = *(other or (out, stats)), out if rules.sinks is None else rules.sinks
    tensors = (q, *pool, rows.page_starts, rows.page_ids, rows.splits, rows.num_done, sums, stats, out, *rest)
    key = (q.dtype, sizes, rules.sinks_key, *alignments(q, *pool, sums, stats, out, *rest))
    options = {"num_warps": 4, "launch_pdl": has_dependent_launch()}
    _decode((num_kv_heads, max_splits, 1), key, (*tensors, max_splits, rules.factor(scale), *sizes), options)
