"""Attention of rows of one token, over pages on a GPU: softmax(q k^T * scale) v, q [T, H, E] -> [T, H, E].

The positions of a row are divided into splits (split-KV, ``attention/_gpu_splits.py``). A program computes a split for
one kv head: it reads keys and values once for all query heads of this kv head. The program that finishes last merges
the splits of a row.

Sums: blocks of positions are added to a running softmax from first to last, and splits are merged in order. So the
result is the same in every run, but it depends on the splits, which depend on the other rows.

A row may also be several tokens of a request (``DecodeRows.max_row_tokens``): then they read its keys and values
together.

R rows, T tokens, H query heads, K kv heads, G query heads of a kv head, E head size, N pages, S page size, X entries
for splits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.triton.dependent import is_last, start_next_and_wait, wait
from aioengine.kernels.triton.launcher import alignments, dtypes, kernel, next_power_of_2, options
from aioengine.kernels.triton.scores import (
    MASKED,
    NO_RULES,
    ScoreRules,
    capped,
    fp16_queries,
    nothing_attended,
    softmax_step,
    store_split,
    with_sinks,
    with_split,
)

MIN_QUERIES = 16
"""Query heads in the smallest tensor core matmul. Fewer query heads per kv head are padded."""
MAX_QUERIES = 32
"""Maximum query heads of all tokens of a row, for one kv head."""
STAGES = tl.constexpr(2)
"""Blocks of positions in flight."""
ONE_ROW_SPLITS = tl.constexpr(32)
"""Maximum entries for the splits of one row."""


class DecodeRows(NamedTuple):
    """The pages of R rows, and their splits; all int32.

    Attributes:
        page_starts: [R + 1] start of each row in ``page_ids``.
        page_ids: the concatenated page tables.
        splits: [5, X], the result of ``attention._gpu_splits.plan_splits``. X is a multiple of 16. With
            ``max_row_tokens`` above 1 it is [7, X], with the first token and the number of tokens of the row of each
            split.
        num_done: [R * K] counters of the kernel: zeros, which are zeros again after it.
        last_lengths: number of positions of each token on the last page of its row; None: splits end with the row.
        max_row_tokens: maximum tokens of a row.
    """

    page_starts: Tensor
    page_ids: Tensor
    splits: Tensor
    num_done: Tensor
    last_lengths: Tensor | None = None
    max_row_tokens: int = 1


class _Sizes(NamedTuple):
    """Constants of the kernel.

    Attributes:
        token_stride: of the queries, in elements.
        block: positions that a program loads at a time. cap: see ``ScoreRules.cap``.
        tokens: maximum tokens of a row.
        queries, more_queries: query heads of one token, and of ``tokens`` tokens, for one kv head; padded. A row of one
            token uses ``queries``, which takes less time.
    """

    token_stride: int
    num_heads: int
    num_kv_heads: int
    page_size: int
    head_size: int
    block: int
    cap: float
    tokens: int
    queries: int
    more_queries: int


@triton.jit
def _finish(
    state: tl.tuple, out: tl.tensor, out_heads: tl.tensor, is_member: tl.tensor, other: tl.tensor,
    other_log_sums: tl.tensor, sinks: tl.tensor, heads: tl.tensor, scales: tl.tensor,
) -> None:  # fmt: skip
    """Store the attention result, after merging it with ``other`` and with the sinks if there are any."""
    if sinks is not None:
        state = with_sinks(state, sinks, heads, is_member)
    highest, total, sums = state
    if scales is not None:
        sums *= tl.load(scales + 1)
    targets = out_heads[:, None] * sums.shape[1] + tl.arange(0, sums.shape[1])[None, :]
    if other is not None:
        other_log_sum = tl.load(other_log_sums + out_heads, mask=is_member, other=MASKED)
        higher = tl.maximum(highest, other_log_sum)
        own, theirs = tl.exp2(highest - higher), tl.exp2(other_log_sum - higher)
        total = total * own + theirs
        added = tl.load(other + targets, mask=is_member[:, None], other=0.0).to(tl.float32)
        sums = sums * own[:, None] + added * theirs[:, None]
    tl.store(out + targets, (sums / total[:, None]).to(out.dtype.element_ty), mask=is_member[:, None])


@triton.jit
def _attend_split(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, pages: tl.tensor, span: tl.tuple, row_tokens: tl.tuple,
    split_sums: tl.tensor, split_stats: tl.tensor, done: tl.tensor, target: tl.tuple, scale: tl.tensor,
    SIZES: tl.constexpr, SEVERAL: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a split for one kv head. The program that finishes the last split of a row merges them.

    Args:
        span: begin and end of the split, number of splits of its row, index of the first of these.
        row_tokens: index of the first token of the row, number of tokens, number of positions before the last page, and
            pointer to the number on the last page of the first token.
        split_sums, split_stats: see ``store_split``. done: counter of the row and kv head.
        target: out, other, other_log_sums, sinks and scales of ``_finish``.
        SEVERAL: the row has several tokens.
    """
    begin, end, count, first_split = span
    first_token, num_tokens, full, last_lengths = row_tokens
    out, other, other_log_sums, sinks, scales = target
    QUERIES: tl.constexpr = SIZES.more_queries if SEVERAL else SIZES.queries
    HEAD_SIZE: tl.constexpr = SIZES.head_size
    GROUP: tl.constexpr = SIZES.num_heads // SIZES.num_kv_heads
    PAGE_STRIDE: tl.constexpr = SIZES.num_kv_heads * SIZES.page_size * HEAD_SIZE
    ALL_HEADS: tl.constexpr = SIZES.tokens * SIZES.num_heads  # of a stored split
    head = tl.program_id(0)
    members, columns = tl.arange(0, QUERIES), tl.arange(0, HEAD_SIZE)[None, :]
    tokens, heads = members // GROUP, head * GROUP + members % GROUP
    is_member = tokens < num_tokens
    if SEVERAL:
        seen = full + tl.load(last_lengths + tokens, mask=is_member, other=0)
    inside = is_member[:, None] & (columns < HEAD_SIZE)
    places = (first_token + tokens) * SIZES.token_stride + heads * HEAD_SIZE
    queries = tl.load(q + places[:, None] + columns, mask=inside, other=0.0)
    keys += head * SIZES.page_size * HEAD_SIZE
    values += head * SIZES.page_size * HEAD_SIZE
    factor = scale
    if scales is not None:
        factor *= tl.load(scales)
    if keys.dtype.element_ty.is_fp8():
        queries, factor = fp16_queries(queries, factor)
    highest, total, sums = nothing_attended(QUERIES, HEAD_SIZE)
    for first in tl.range(begin, end, SIZES.block, num_stages=STAGES):
        positions = first + tl.arange(0, SIZES.block)
        is_there = positions < end
        page = tl.load(pages + positions // SIZES.page_size, mask=is_there, other=0).to(tl.int64)
        offsets = (page * PAGE_STRIDE + positions % SIZES.page_size * HEAD_SIZE)[:, None] + columns
        scores = tl.dot(queries, tl.trans(tl.load(keys + offsets).to(queries.dtype))) * factor
        if SIZES.cap > 0.0:
            scores = capped(scores, SIZES.cap)
        is_seen = is_there[None, :]
        if SEVERAL:
            is_seen = is_seen & (positions[None, :] < seen[:, None])
        weights, shrink, highest, total = softmax_step(tl.where(is_seen, scores, MASKED), highest, total)
        # values beyond the end have weight 0, but may be NaN
        block_values = tl.load(values + offsets, mask=is_there[:, None], other=0.0).to(queries.dtype)
        sums = tl.dot(weights.to(queries.dtype), block_values, sums * shrink[:, None])
    state, token_heads = (highest, total, sums), tokens * SIZES.num_heads + heads
    finished = out, first_token * SIZES.num_heads + token_heads, is_member, other, other_log_sums, sinks, heads, scales
    if count == 1:
        _finish(state, *finished)
    else:
        split_heads = tl.program_id(1) * ALL_HEADS + token_heads
        store_split(split_sums, split_stats, split_heads, state, is_member, HEAD_SIZE)
        if is_last(done, count):
            sources = first_split * ALL_HEADS + token_heads
            whole = nothing_attended(QUERIES, HEAD_SIZE)
            for index in tl.range(0, count, loop_unroll_factor=4):
                source = sources + index * ALL_HEADS
                whole = with_split(whole, split_sums, split_stats, source, is_member, HEAD_SIZE)
            _finish(whole, *finished)
            tl.store(done, 0)


@kernel(do_not_specialize_on_alignment=["page_starts", "page_ids", "splits", "num_done", "last_lengths"])
def _decode_kernel(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, page_starts: tl.tensor, page_ids: tl.tensor, splits: tl.tensor,
    num_done: tl.tensor, last_lengths: tl.tensor, split_sums: tl.tensor, split_stats: tl.tensor, out: tl.tensor,
    other: tl.tensor, other_log_sums: tl.tensor, sinks: tl.tensor, scales: tl.tensor, max_splits: tl.tensor,
    scale: tl.tensor,
    SIZES: tl.constexpr,
) -> None:  # fmt: skip
    """Call ``_attend_split`` for a split and a kv head."""
    split = splits + tl.program_id(1)
    row = tl.load(split).to(tl.int64)
    if row >= 0:
        begin, end = tl.load(split + max_splits), tl.load(split + 2 * max_splits)
        count, first_split = tl.load(split + 3 * max_splits), tl.load(split + 4 * max_splits)
        first_page, first_token, num_tokens = tl.load(page_starts + row), row, 1
        full = (tl.load(page_starts + row + 1) - first_page - 1) * SIZES.page_size
        if SIZES.tokens > 1:
            first_token, num_tokens = tl.load(split + 5 * max_splits).to(tl.int64), tl.load(split + 6 * max_splits)
        if last_lengths is not None:
            last_lengths += first_token
            end = tl.minimum(end, full + tl.load(last_lengths + num_tokens - 1))
        if max_splits <= ONE_ROW_SPLITS:
            start_next_and_wait()  # a product of one row loads weights while it waits
        else:
            wait()  # see ``wait_between_products``; here the next kernel starts at the end
        span, row_tokens = (begin, end, count, first_split), (first_token, num_tokens, full, last_lengths)
        done = num_done + row * SIZES.num_kv_heads + tl.program_id(0)
        target = out, other, other_log_sums, sinks, scales
        tensors = q, keys, values, page_ids + first_page, span, row_tokens, split_sums, split_stats, done, target, scale
        for SEVERAL in tl.static_range(2 if SIZES.tokens > 1 else 1):
            if (num_tokens > 1) == SEVERAL:
                _attend_split(*tensors, SIZES, SEVERAL)


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
    """Attend with q [T, H, E] (contiguous heads) to keys and values [N, K, S, E] into ``out`` [T, H, E].

    Each row has one token if ``rows.max_row_tokens`` is 1.

    other: the attention result over further positions, contiguous [T, H, E], and log2 of its sum of exponentials,
    [T, H] fp32. It is merged into the result. A row without such positions has finite numbers and a low logarithm.
    rules: the window must be the one of ``rows.splits``.
    """
    num_heads, head_size = q.shape[1:]
    _, num_kv_heads, page_size, _ = pool[0].shape
    max_splits = rows.splits.shape[1]
    num_tokens = rows.max_row_tokens
    sums = torch.empty(max_splits, num_tokens * num_heads, head_size, dtype=torch.float32, device=q.device)
    stats = torch.empty(max_splits, num_tokens * num_heads, 2, dtype=torch.float32, device=q.device)
    group = num_heads // num_kv_heads
    sizes = _Sizes(
        token_stride=q.stride(0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        head_size=head_size,
        block=128 if head_size <= 128 else 64,
        cap=rules.cap,
        tokens=num_tokens,
        queries=max(next_power_of_2(group), MIN_QUERIES),
        more_queries=max(next_power_of_2(num_tokens * group), MIN_QUERIES),
    )
    tensors = (q, *pool, *rows[:5], sums, stats, out)
    alignment = alignments(q, *pool, sums, stats, out, *(other or ()))
    key = (*dtypes(q, pool[0]), sizes, rows.last_lengths is None, rules.tensors_key, *alignment)
    arguments = (*tensors, *(other or (None, None)), rules.sinks, rules.scales, max_splits, rules.factor(scale), sizes)
    _decode_kernel((num_kv_heads, max_splits, 1), key, arguments, options(4))
