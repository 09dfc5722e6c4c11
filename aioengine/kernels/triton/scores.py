"""The softmax of attention, block after block, and its options: sliding windows, soft caps, learned sinks.

Scores are scaled by log2(e), so that weights are powers of 2. G query rows, H query heads, E head size, T tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.triton.launcher import alignments, dtypes, kernel, next_power_of_2

LOG2_E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(-1.0e30)
"""Score of a position that a query row does not attend to."""


class ScoreRules(NamedTuple):
    """The features of one layer; None: not used.

    Attributes:
        window: number of positions that a token attends to, including its own.
        soft_cap: as in ``AttentionShape``.
        sinks: [H], as in ``AttentionShape``.
        scales: [2] fp32, factors of the keys and values in the pool.
    """

    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    scales: Tensor | None = None

    def factor(self, scale: float) -> float:
        """Return the factor of dot products; with a cap, as ``capped`` needs it."""
        return scale / math.log(2) * (1.0 if self.soft_cap is None else 2.0 / self.soft_cap)

    @property
    def cap(self) -> float:
        """The constant CAP of the kernels; 0.0: no cap."""
        return 0.0 if self.soft_cap is None else self.soft_cap / math.log(2)

    @property
    def tensors_key(self) -> object:
        """The part of a ``KernelLauncher`` key that depends on the sinks and the scales."""
        return dtypes(self.sinks), alignments(self.sinks, self.scales)


NO_RULES = ScoreRules()


@triton.jit
def fp16_queries(queries: tl.tensor, scale: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Convert bf16 queries [G, E] of fp8 keys to fp16. One instruction converts two fp8 numbers to fp16, but to bf16 it
    takes three slow ones.

    Each query is divided by a power of two to fit into fp16. The returned scale [G, 1] includes it.
    """
    if queries.dtype == tl.bfloat16:
        wide = queries.to(tl.float32)
        power = tl.exp2(tl.floor(tl.log2(tl.maximum(tl.max(tl.abs(wide), 1), 1e-30))))[:, None]
        queries, scale = (wide / power).to(tl.float16), scale * power
    return queries, scale


@triton.jit
def capped(products: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """Return ``CAP * tanh(x)`` for products = 2 x * log2(e)."""
    return CAP - 2.0 * CAP / (tl.exp2(products) + 1.0)


@triton.jit
def nothing_attended(ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tuple:
    """Return the state before the first position: the highest score and the sum of weights of each query row, and its
    weighted values.
    """
    highest = tl.full((ROWS,), MASKED, tl.float32)
    return highest, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)


@triton.jit
def softmax_step(
    scores: tl.tensor, highest: tl.tensor, total: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Add a block of positions to the softmax. Return the weights of these positions, the factor by which the previous
    weighted values must be multiplied, the new highest score and the new sum of weights.
    """
    higher = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(highest - higher)
    return weights, shrink, higher, tl.fma(total, shrink, tl.sum(weights, 1))


@triton.jit
def merged(state: tl.tuple, split: tl.tuple) -> tl.tuple:
    """Merge the next split into the state of the previous splits. FMAs are explicit, so that the compiler cannot fuse
    operations differently in two kernels.
    """
    highest, total, sums = state
    split_highest, split_total, split_sums = split
    higher = tl.maximum(highest, split_highest)
    shrink = tl.exp2(highest - higher)
    weight = tl.exp2(split_highest - higher)
    total = tl.fma(split_total, weight, total * shrink)
    sums = tl.fma(split_sums, tl.broadcast_to(weight[:, None], sums.shape), sums * shrink[:, None])
    return higher, total, sums


@triton.jit
def store_split(
    split_sums: tl.tensor, split_stats: tl.tensor, targets: tl.tensor, state: tl.tuple, is_head: tl.tensor,
    VALUE_SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Store the state of a split of a row: the weighted values in ``split_sums``, the highest score and the sum of
    weights in ``split_stats``. targets: [G] indices of (row, split, head).
    """
    highest, total, sums = state
    columns = tl.arange(0, sums.shape[1])[None, :]
    inside = is_head[:, None] & (columns < VALUE_SIZE)
    tl.store(split_sums + targets[:, None] * VALUE_SIZE + columns, sums, mask=inside)
    tl.store(split_stats + 2 * targets, highest, mask=is_head)
    tl.store(split_stats + 2 * targets + 1, total, mask=is_head)


@triton.jit
def with_split(
    state: tl.tuple, split_sums: tl.tensor, split_stats: tl.tensor, sources: tl.tensor, is_head: tl.tensor,
    VALUE_SIZE: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Merge the stored split of each head into the state of the previous splits. Other programs have stored it (see
    ``is_last``). sources: [G], see ``store_split``.
    """
    highest = tl.load(split_stats + 2 * sources, mask=is_head, other=0.0, cache_modifier=".cg")
    total = tl.load(split_stats + 2 * sources + 1, mask=is_head, other=1.0, cache_modifier=".cg")
    columns = tl.arange(0, state[2].shape[1])[None, :]
    pointers = split_sums + sources[:, None] * VALUE_SIZE + columns
    sums = tl.load(pointers, mask=is_head[:, None] & (columns < VALUE_SIZE), other=0.0, cache_modifier=".cg")
    return merged(state, (highest, total, sums))


@triton.jit
def with_sinks(state: tl.tuple, sinks: tl.tensor, heads: tl.tensor, is_head: tl.tensor) -> tl.tuple:
    """Return the state of query rows after adding the sinks of their heads [G]. FMAs are explicit, as in ``merged``."""
    highest, total, sums = state
    sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
    higher = tl.maximum(highest, sink)
    shrink = tl.exp2(highest - higher)
    return higher, tl.fma(total, shrink, tl.exp2(sink - higher)), sums * shrink[:, None]


@triton.jit
def store_attended(
    out: tl.tensor, targets: tl.tensor, is_head: tl.tensor, state: tl.tuple, sinks: tl.tensor, heads: tl.tensor,
    scales: tl.tensor, VALUE_SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Store the attention result of query rows at indices ``targets`` [G] of ``out``, after adding the sinks of their
    heads [G] if there are any. scales: factors of keys and values, or None.
    """
    if sinks is not None:
        state = with_sinks(state, sinks, heads, is_head)
    columns = tl.arange(0, state[2].shape[1])[None, :]
    places = targets[:, None] * VALUE_SIZE + columns
    inside = is_head[:, None] & (columns < VALUE_SIZE)
    attended = state[2] / state[1][:, None]
    if scales is not None:
        attended *= tl.load(scales + 1)
    tl.store(out + places, attended.to(out.dtype.element_ty), mask=inside)


MERGED_ROWS = tl.constexpr(16)
"""Heads of tokens per program."""


@kernel(do_not_specialize=["num_rows"])
def _merge_results_kernel(
    out: tl.tensor, log_sums: tl.tensor, other: tl.tensor, other_log_sums: tl.tensor, num_rows: tl.tensor,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, COLUMNS: tl.constexpr, SINKS: tl.constexpr,
) -> None:  # fmt: skip
    """Merge ``other`` into the result of each head. SINKS: ``other_log_sums`` are sinks, whose values are 0."""
    rows = tl.program_id(0).to(tl.int64) * MERGED_ROWS + tl.arange(0, MERGED_ROWS)
    is_there = rows < num_rows
    if SINKS:
        other_log_sum = tl.load(other_log_sums + rows % NUM_HEADS, mask=is_there, other=0.0).to(tl.float32) * LOG2_E
    else:
        other_log_sum = tl.load(other_log_sums + rows, mask=is_there, other=0.0)
    share = 1.0 / (1.0 + tl.exp2(other_log_sum - tl.load(log_sums + rows, mask=is_there, other=0.0)))
    columns = tl.arange(0, COLUMNS)[None, :]
    targets = rows[:, None] * HEAD_SIZE + columns
    inside = is_there[:, None] & (columns < HEAD_SIZE)
    own = tl.load(out + targets, mask=inside, other=0.0)
    if SINKS:
        result = own.to(tl.float32) * share[:, None]
    else:
        theirs = tl.load(other + targets, mask=inside, other=0.0).to(tl.float32)
        result = theirs + (own.to(tl.float32) - theirs) * share[:, None]
    tl.store(out + targets, result.to(own.dtype), mask=inside)


def merge(out: Tensor, log_sums: Tensor, other: Tensor, other_log_sums: Tensor) -> None:
    """Merge ``other`` into ``out``, contiguous [T, H, E] each: results of attention over different positions.

    log_sums, other_log_sums: [T, H] fp32, log2 of the sum of exponentials.
    """
    _launch(out, log_sums, other, other_log_sums, has_sinks=False)


def add_sinks(out: Tensor, log_sums: Tensor, sinks: Tensor) -> None:
    """Apply the learned sinks [H] to the attention result ``out``, contiguous [T, H, E].

    log_sums: [T, H] fp32, log2 of the sum of exponentials.
    """
    _launch(out, log_sums, out, sinks, has_sinks=True)


def _launch(out: Tensor, log_sums: Tensor, other: Tensor, other_log_sums: Tensor, *, has_sinks: bool) -> None:
    """Merge into out [T, H, E] and log_sums [T, H]: see ``_merge_results_kernel``."""
    num_rows, (num_heads, head_size) = log_sums.numel(), out.shape[1:]
    tensors = out, log_sums, other, other_log_sums
    sizes = num_heads, head_size, next_power_of_2(head_size), has_sinks
    key, arguments = (*dtypes(out, other_log_sums), sizes, *alignments(*tensors)), (*tensors, num_rows, *sizes)
    _merge_results_kernel((-(-num_rows // MERGED_ROWS.value), 1, 1), key, arguments, {"num_warps": 4})
