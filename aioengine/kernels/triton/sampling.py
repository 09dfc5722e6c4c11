"""Sample token ids from logits on a GPU, without synchronizing with the host.

The token of a row depends only on its logits, seed and position, because the summation order depends only on the
vocabulary size, and not on the type of the logits. Truncation rules and random numbers equal ``truncation`` and
``philox`` in ``runner.sampling``. The probability mass is accumulated over blocks of ``BLOCK`` tokens, then within the
chosen block.

Each rank of tensor parallelism has a part of the vocabulary, and a block belongs to one part. The ranks send the
maximum and the mass of their blocks to all others (``rank_messages``), so all of them choose the same block. The rank
that has this block sends the token. The tokens are the same as those of all logits on one rank.

Truncation compares weights: probabilities relative to the largest one, in fp32. Their bits as integers have the same
order, because no weight is negative. A threshold is found by bisection over these bits; 0x3F800000 is 1.0, the largest
weight, and the threshold -1 is below all weights.

``_blocks_kernel`` has a program for each block of a row, ``_pick_kernel`` and ``_truncated_kernel`` one for each row.

S rows, X truncated rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioengine.kernels.triton.dependent import start_next_and_wait
from aioengine.kernels.triton.launcher import kernel, next_power_of_2, options
from aioengine.kernels.triton.rank_messages import SharedMemory, message, received

BLOCK = tl.constexpr(2048)
"""Tokens of a program of ``_blocks_kernel``."""
LOOP_BLOCK = tl.constexpr(8192)
"""Tokens that a program loads at once for rows with truncation rules."""
CONTIGUOUS = tl.constexpr(4)
"""Logits that a thread loads at once, and adds first. Without this limit, Triton chooses 8 of bf16 and 4 of fp32."""
NUM_FIELDS = 5
"""Rows of ``Draws.fields``."""


class Draws(NamedTuple):
    """How S rows are sampled.

    fields: [5, S] int32: low and high half of the seed, position, 1 / temperature (fp32 bits), is greedy.
    rules: (rows [X] int32, top_k [X] int32, top_p and min_p [X] fp32) of the truncated rows; None: no row is truncated.
    """

    fields: Tensor
    rules: tuple[Tensor, Tensor, Tensor, Tensor] | None = None


@triton.jit
def _uniform(fields: tl.tensor, field_stride: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Return the random number in [0, 1) of this row: Philox4x32-10."""
    key_0 = tl.load(fields + row).to(tl.uint32, bitcast=True)
    key_1 = tl.load(fields + field_stride + row).to(tl.uint32, bitcast=True)
    count_0 = tl.load(fields + 2 * field_stride + row).to(tl.uint32, bitcast=True)
    count_1 = tl.zeros_like(count_0)
    count_2 = tl.zeros_like(count_0)
    count_3 = tl.zeros_like(count_0)
    multiplier_0 = tl.full((), 0xD2511F53, tl.uint32)
    multiplier_1 = tl.full((), 0xCD9E8D57, tl.uint32)
    step_0 = tl.full((), 0x9E3779B9, tl.uint32)
    step_1 = tl.full((), 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        high_0 = tl.umulhi(count_0, multiplier_0)
        high_1 = tl.umulhi(count_2, multiplier_1)
        low_0 = count_0 * multiplier_0
        low_1 = count_2 * multiplier_1
        count_0 = high_1 ^ count_1 ^ key_0
        count_2 = high_0 ^ count_3 ^ key_1
        count_1 = low_1
        count_3 = low_0
        key_0 = key_0 + step_0
        key_1 = key_1 + step_1
    high = (count_0 >> 5).to(tl.float64)
    low = (count_1 >> 6).to(tl.float64)
    return (high * 67108864.0 + low) * (1.0 / 9007199254740992.0)


@triton.jit
def _larger(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    return tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _tokens_of(block: tl.tensor, part_size: tl.tensor, num_tokens: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the token ids of a block, and which of them it has."""
    blocks_of_part = tl.cdiv(part_size, BLOCK)
    first = block // blocks_of_part * part_size
    tokens = tl.max_contiguous(first + block % blocks_of_part * BLOCK + tl.arange(0, BLOCK), CONTIGUOUS)
    return tokens, tokens < tl.minimum(first + part_size, num_tokens)


@triton.jit
def _line(inboxes: tl.tensor, rank: tl.constexpr, place: tl.tensor) -> tl.tensor:
    """Return the address of a line in the inbox of a rank."""
    return tl.load(inboxes + rank).to(tl.pointer_type(tl.int64)) + place


@kernel(do_not_specialize=["field_stride"], do_not_specialize_on_alignment=["fields", "indices"])
def _blocks_kernel(
    logits: tl.tensor, row_stride: tl.tensor, num_tokens: tl.tensor, part_size: tl.tensor, fields: tl.tensor,
    field_stride: tl.tensor, maxima: tl.tensor, masses: tl.tensor, num_blocks: tl.tensor, indices: tl.tensor,
    inboxes: tl.tensor, counts: tl.tensor, RANK: tl.constexpr, SIZE: tl.constexpr, MAX_ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Store for each block of a row its largest logit (NaN if it contains NaN), and the mass relative to this logit. In
    greedy rows, store the index of this logit instead of the mass, as int32 bits. With ``inboxes``, send them.
    """
    row, block = tl.program_id(0), tl.program_id(1) + RANK * tl.num_programs(1)
    tokens, inside = _tokens_of(block, part_size, num_tokens)
    start_next_and_wait()
    if indices is not None:
        inside = inside & (tl.load(indices + row) >= 0)
    own = logits + row.to(tl.int64) * row_stride + (tokens - RANK * part_size)
    x = tl.load(own, mask=inside, other=-float("inf")).to(tl.float32)
    largest = tl.reduce(x, 0, _larger)
    scale = tl.load(fields + 3 * field_stride + row).to(tl.float32, bitcast=True)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    mass = tl.sum(tl.exp((x - base) * scale), 0).to(tl.int32, bitcast=True)
    if tl.load(fields + 4 * field_stride + row) != 0:
        mass = tl.min(tl.where(x == largest, tokens, num_tokens), 0)
    if inboxes is None:
        tl.store(maxima + row * num_blocks + block, largest)
        tl.store(masses + row * num_blocks + block, mass)
    else:
        count = tl.load(counts + row) + 1
        place = ((count & 1) * MAX_ROWS + row) * (2 * num_blocks + 1) + block
        for peer in tl.static_range(SIZE):
            line = _line(inboxes, peer, place)
            tl.store(line, message(largest.to(tl.int32, bitcast=True), count))
            tl.store(line + num_blocks, message(mass, count))


@kernel(do_not_specialize=["field_stride"], do_not_specialize_on_alignment=["fields", "out", "indices", "last_tokens"])
def _pick_kernel(
    logits: tl.tensor, row_stride: tl.tensor, num_tokens: tl.tensor, part_size: tl.tensor, fields: tl.tensor,
    field_stride: tl.tensor, maxima: tl.tensor, masses: tl.tensor, num_blocks: tl.tensor, indices: tl.tensor,
    inboxes: tl.tensor, counts: tl.tensor, out: tl.tensor, last_tokens: tl.tensor,
    RANK: tl.constexpr, SIZE: tl.constexpr, MAX_ROWS: tl.constexpr, BLOCKS: tl.constexpr,
) -> None:  # fmt: skip
    """Store the token of a row: greedy or sampled. It is -1 if a logit is NaN or +inf, or if no logit is finite."""
    row = tl.program_id(0)
    blocks = tl.arange(0, BLOCKS)
    inside = blocks < num_blocks
    start_next_and_wait()
    if inboxes is None:
        largest = tl.load(maxima + row * num_blocks + blocks, mask=inside, other=-float("inf"))
        bits = tl.load(masses + row * num_blocks + blocks, mask=inside, other=0)
    else:
        count = tl.load(counts + row) + 1
        place = ((count & 1) * MAX_ROWS + row) * (2 * num_blocks + 1)
        line = _line(inboxes, RANK, place)
        largest = received(line + blocks, inside, count).to(tl.float32, bitcast=True)
        largest = tl.where(inside, largest, -float("inf"))
        bits = received(line + num_blocks + blocks, inside, count)
    is_bad = tl.max((largest != largest).to(tl.int32), 0) > 0
    top = tl.max(largest, 0)
    is_bad = is_bad | (top == float("inf")) | (top == -float("inf"))
    is_greedy = tl.load(fields + 4 * field_stride + row) != 0
    scale = tl.load(fields + 3 * field_stride + row).to(tl.float32, bitcast=True)

    mass = tl.where(is_greedy, 0, bits).to(tl.float32, bitcast=True)
    mass = tl.where(inside, mass * tl.exp((largest - top) * scale), 0.0).to(tl.float64)
    cumulated = tl.cumsum(mass, 0)
    target = _uniform(fields, field_stride, row) * tl.max(cumulated, 0)
    last = tl.max(tl.where(mass > 0.0, blocks, 0), 0)
    drawn = tl.min(tl.where(cumulated > target, blocks, last), 0)
    best = tl.min(tl.where(largest == top, blocks, BLOCKS), 0)
    block = tl.where(is_bad, 0, tl.where(is_greedy, best, drawn))

    tokens, in_block = _tokens_of(block, part_size, num_tokens)
    is_own = block // tl.cdiv(part_size, BLOCK) == RANK
    if inboxes is not None:
        in_block = in_block & is_own
    own = logits + row.to(tl.int64) * row_stride + (tokens - RANK * part_size)
    x = tl.load(own, mask=in_block, other=-float("inf")).to(tl.float32)
    inner = tl.exp((x - top) * scale).to(tl.float64)
    before = tl.sum(tl.where(blocks == block, cumulated - mass, 0.0), 0)
    above = tl.cumsum(inner, 0) + before > target
    # The fallback is the last token with a mass: rounding may leave no token above the target. Otherwise it is never
    # smaller than the sampled token, which is the first token above the target.
    fallback = tl.max(tl.where(inner > 0.0, tokens, 0), 0)
    token = tl.min(tl.where(above, tokens, fallback), 0)
    token = tl.where(is_greedy, tl.sum(tl.where(blocks == block, bits, 0), 0), token)
    token = tl.where(is_bad, -1, token)
    if inboxes is not None:
        if is_own:
            for peer in tl.static_range(SIZE):
                tl.store(_line(inboxes, peer, place) + 2 * num_blocks, message(token, count))
        token = tl.sum(received(line + 2 * num_blocks + tl.arange(0, 1), tl.arange(0, 1) == 0, count), 0)
        tl.store(counts + row, count)
    tl.store(out + row, token.to(tl.int64))
    if indices is not None:
        index = tl.load(indices + row)
        tl.store(last_tokens + index, tl.maximum(token, 0).to(tl.int64), mask=index >= 0)


@triton.jit
def _weights(row: tl.tuple, columns: tl.tensor, num_tokens: tl.constexpr) -> tl.tensor:
    """Return the weights of these tokens. row: address of its logits, the largest one, and 1 / temperature."""
    loaded = tl.load(row[0] + columns, mask=columns < num_tokens, other=-float("inf")).to(tl.float32)
    return tl.exp((loaded - row[1]) * row[2])


@triton.jit
def _above(row: tl.tuple, num_tokens: tl.constexpr, threshold: tl.tensor, COUNTS: tl.constexpr) -> tl.tensor:
    """Return the count or the mass (float64) of the tokens whose weight is above ``threshold``."""
    total = tl.zeros((), tl.float64)
    for start in range(0, num_tokens, LOOP_BLOCK):
        columns = tl.max_contiguous(start + tl.arange(0, LOOP_BLOCK), CONTIGUOUS)
        weight = _weights(row, columns, num_tokens)
        is_above = (weight.to(tl.int32, bitcast=True) > threshold) & (columns < num_tokens)
        if COUNTS:
            total += tl.sum(is_above.to(tl.int32), 0).to(tl.float64)
        else:
            total += tl.sum(tl.where(is_above, weight, 0.0), 0).to(tl.float64)
    return total


@triton.jit
def _find_threshold(row: tl.tuple, num_tokens: tl.constexpr, limit: tl.tensor, COUNTS: tl.constexpr) -> tl.tensor:
    """Return the smallest threshold above which the count or mass of the tokens is less than ``limit``."""
    low = tl.full((), -1, tl.int32)
    high = tl.full((), 0x3F800000, tl.int32)
    high = tl.where(_above(row, num_tokens, low, COUNTS) < limit, low, high)
    for _ in range(31):
        middle = (low + high) // 2
        is_less = _above(row, num_tokens, middle, COUNTS) < limit
        high = tl.where(is_less, middle, high)
        low = tl.where(is_less, low, middle)
    return high


@kernel(
    do_not_specialize=["field_stride"],
    do_not_specialize_on_alignment=["fields", "rows", "top_ks", "top_ps", "min_ps", "out"],
)
def _truncated_kernel(
    logits: tl.tensor, row_stride: tl.tensor, num_tokens: tl.constexpr, fields: tl.tensor, field_stride: tl.tensor,
    maxima: tl.tensor, num_blocks: tl.tensor, rows: tl.tensor, top_ks: tl.tensor, top_ps: tl.tensor, min_ps: tl.tensor,
    out: tl.tensor, BLOCKS: tl.constexpr,
) -> None:  # fmt: skip
    """Sample after top-k, then top-p, then min-p. Ties at the threshold are kept in vocabulary order."""
    index = tl.program_id(0)
    row = tl.load(rows + index)
    blocks = tl.arange(0, BLOCKS)
    largest = tl.load(maxima + row * num_blocks + blocks, mask=blocks < num_blocks, other=-float("inf"))
    top = tl.max(largest, 0)
    is_bad = (tl.max((largest != largest).to(tl.int32), 0) > 0) | (top == float("inf")) | (top == -float("inf"))
    scale = tl.load(fields + 3 * field_stride + row).to(tl.float32, bitcast=True)
    own = (logits + row.to(tl.int64) * row_stride, top, scale)
    top_k = tl.load(top_ks + index).to(tl.float64)
    top_p = tl.load(top_ps + index).to(tl.float64)
    min_p = tl.load(min_ps + index)
    if not is_bad:
        threshold = tl.full((), -1, tl.int32)
        num_ties = tl.full((), 1 << 30, tl.int32)
        if top_k < num_tokens:
            threshold = _find_threshold(own, num_tokens, top_k, True)
            num_ties = (top_k - _above(own, num_tokens, threshold, True)).to(tl.int32)
        if top_p < 1.0:
            mass = _above(own, num_tokens, threshold, False)
            if threshold >= 0:
                mass += num_ties.to(tl.float64) * threshold.to(tl.float32, bitcast=True).to(tl.float64)
            limit = top_p * mass
            nucleus = _find_threshold(own, num_tokens, limit, False)
            if nucleus >= threshold:
                value = nucleus.to(tl.float32, bitcast=True).to(tl.float64)
                missing = limit - _above(own, num_tokens, nucleus, False)
                fitting = tl.ceil(missing / tl.maximum(value, 1e-300)).to(tl.int32)
                fitting = tl.maximum(fitting, 1)
                num_ties = tl.where(nucleus == threshold, tl.minimum(num_ties, fitting), fitting)
                threshold = nucleus
        least = min_p.to(tl.int32, bitcast=True)
        if (min_p > 0.0) & (least > threshold):
            threshold = least - 1
            num_ties = tl.full((), 0, tl.int32)
        _draw_kept(own, num_tokens, threshold, num_ties, _uniform(fields, field_stride, row), out + row)


@triton.jit
def _kept(
    weight: tl.tensor, inside: tl.tensor, threshold: tl.tensor, num_ties: tl.tensor, num_seen: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the weights of a block, 0 for tokens that are not kept, and the number of ties of all blocks so far."""
    bits = weight.to(tl.int32, bitcast=True)
    is_tie = (bits == threshold) & inside
    ties = is_tie.to(tl.int32)
    rank = num_seen + tl.cumsum(ties, 0) - ties
    is_kept = ((bits > threshold) & inside) | (is_tie & (rank < num_ties))
    return tl.where(is_kept, weight, 0.0), num_seen + tl.sum(ties, 0)


@triton.jit
def _draw_kept(
    row: tl.tuple, num_tokens: tl.constexpr, threshold: tl.tensor, num_ties: tl.tensor, uniform: tl.tensor,
    out: tl.tensor,
) -> None:  # fmt: skip
    """Store the first token at which the cumulative mass of kept tokens exceeds ``uniform`` times their total mass.

    num_ties: how many tokens with exactly the threshold weight are kept, in vocabulary order.
    """
    whole = tl.zeros((), tl.float64)
    num_seen = tl.zeros((), tl.int32)
    for start in range(0, num_tokens, LOOP_BLOCK):
        columns = tl.max_contiguous(start + tl.arange(0, LOOP_BLOCK), CONTIGUOUS)
        weight = _weights(row, columns, num_tokens)
        weight, num_seen = _kept(weight, columns < num_tokens, threshold, num_ties, num_seen)
        whole += tl.sum(weight.to(tl.float64), 0)
    target = uniform * whole
    mass = tl.zeros((), tl.float64)
    num_seen = tl.zeros((), tl.int32)
    token = tl.full((), 1 << 30, tl.int32)
    last = tl.zeros((), tl.int32)
    for start in range(0, num_tokens, LOOP_BLOCK):
        columns = tl.max_contiguous(start + tl.arange(0, LOOP_BLOCK), CONTIGUOUS)
        weight = _weights(row, columns, num_tokens)
        weight, num_seen = _kept(weight, columns < num_tokens, threshold, num_ties, num_seen)
        wide = weight.to(tl.float64)
        above = (tl.cumsum(wide, 0) + mass > target) & (weight > 0.0)
        token = tl.minimum(token, tl.min(tl.where(above, columns, 1 << 30), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, columns, 0), 0))
        mass += tl.sum(wide, 0)
    tl.store(out, tl.minimum(token, last).to(tl.int64))


def _sizes(vocab_size: int, num_embeddings: int, num_parts: int) -> tuple[int, int]:
    """Return the tokens of a part, and the blocks of all parts. See ``SamplingKernels``."""
    part_size = vocab_size if num_parts == 1 else triton.cdiv(num_embeddings, num_parts)
    return part_size, num_parts * triton.cdiv(part_size, BLOCK.value)


class RankSampling:
    """What a rank needs to sample from its part of the vocabulary, for up to ``max_rows`` rows.

    Attributes:
        counts: [max_rows] int32, the messages of each row so far.
        memory: of the inbox, with lines [2, max_rows, 2 * num_blocks + 1]: maximum and mass of each block, and the
            token. The two lines of a row are used in turns, as in ``rank_sums``.
    """

    def __init__(self, rank: int, size: int, *, max_rows: int, num_embeddings: int, device: torch.device) -> None:
        """Allocate the inbox. num_embeddings: tokens of all ranks."""
        self.rank, self.size, self.max_rows = rank, size, max_rows
        _, num_blocks = _sizes(0, num_embeddings, size)
        self.counts = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.memory = SharedMemory(8 * 2 * max_rows * (2 * num_blocks + 1), device)


class SamplingKernels:
    """The kernels and their scratch memory, for up to ``max_rows`` rows of logits."""

    def __init__(
        self,
        *,
        max_rows: int,
        vocab_size: int,
        num_embeddings: int,
        device: torch.device,
        num_parts: int = 1,
        ranks: RankSampling | None = None,
    ) -> None:
        """Allocate the scratch memory.

        Args:
            vocab_size: tokens that may be sampled.
            num_embeddings: tokens of the model.
            num_parts: number of ranks.
            ranks: the logits are the part of this rank, and all ranks sample at the same time.
        """
        self._vocab_size, self._ranks = vocab_size, ranks
        self._part_size, self._num_blocks = _sizes(vocab_size, num_embeddings, num_parts)
        self._maxima = torch.empty(max_rows, self._num_blocks, device=device)
        self._masses = torch.empty(max_rows, self._num_blocks, dtype=torch.int32, device=device)

    def sample(
        self, logits: Tensor, draws: Draws, out: Tensor, last_tokens: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Sample one token per row of logits [S, >= V] into ``out`` [S] int64; -1 for a bad row.

        last_tokens: (indices [S] int32, tokens int64): the token of each row is also stored in ``tokens`` at its index,
        0 for a bad row. A row with index -1 is skipped: its token is -1. Not supported together with rules.
        """
        num_rows, num_blocks, blocks = len(logits), self._num_blocks, next_power_of_2(self._num_blocks)
        sizes = logits.stride(0), self._vocab_size, self._part_size
        fields = draws.fields, draws.fields.stride(0)
        indices, tokens = last_tokens or (None, None)
        inputs = (logits, *sizes, *fields, self._maxima, self._masses, num_blocks, indices)
        ranks = self._ranks
        inbox = (None, None) if ranks is None else (ranks.memory.addresses, ranks.counts)
        constants = (0, 1, 0) if ranks is None else (ranks.rank, ranks.size, ranks.max_rows)
        key = (logits.dtype, *sizes, num_blocks, logits.data_ptr() % 16, indices is None, *constants)
        grid = num_rows, num_blocks // constants[1], 1
        _blocks_kernel(grid, key, (*inputs, *inbox, *constants), options(1))
        _pick_kernel((num_rows, 1, 1), key, (*inputs, *inbox, out, tokens, *constants, blocks), options(8))
        if draws.rules is not None:
            arguments = (logits, *sizes[:2], *fields, self._maxima, num_blocks, *draws.rules, out, blocks)
            _truncated_kernel((len(draws.rules[0]), 1, 1), key, arguments, {"num_warps": 16})

    def run_all(self, logits: Tensor) -> None:
        """Run all specializations of the kernels for logits like these [1, >= V], to compile them."""
        device = logits.device
        fields = torch.zeros(NUM_FIELDS, 1, dtype=torch.int32, device=device)
        ints, floats = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, device=device)
        out = torch.zeros(1, dtype=torch.int64, device=device)
        for scores in (logits, logits.float()):  # logits processors return fp32
            self.sample(scores, Draws(fields, (ints, ints, floats, floats)), out)
        self.sample(logits, Draws(fields), out, (ints, out))
