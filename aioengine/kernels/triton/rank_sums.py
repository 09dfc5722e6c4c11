"""Sums over the ranks of tensor parallelism, on GPUs of one machine that can reach each other's memory.

Each rank sends its part of a row (``rank_parts``) to all others. The kernel that computes the parts can send them
(``Inboxes.sender``), also to its own rank. Then the kernel of the sum starts beside it, and only waits and adds.

R rows, D columns, X words of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from aioengine.kernels.triton.dependent import start_next, start_next_and_wait, wait
from aioengine.kernels.triton.launcher import KernelLauncher, alignments, next_power_of_2, options
from aioengine.kernels.triton.rank_messages import SharedMemory
from aioengine.kernels.triton.rank_parts import (
    MAX_SENT_ROWS,
    addresses_of,
    line_of,
    packed,
    received,
    send,
    unpacked,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from aioengine.kernels.triton.rank_parts import Sender


@triton.jit
def _sum_kernel(
    parts: tl.tensor, residual: tl.tensor, weight: tl.tensor, out: tl.tensor, num_columns: tl.tensor,
    epsilon: tl.tensor, inboxes: tl.tensor, turns: tl.tensor,
    RANKS: tl.constexpr, IS_SENT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store the sum of a row over the ranks. With a residual, add the sum to it, and store its RMS norm instead.

    parts, residual, out: [R, D]; weight: [D]. inboxes: [ranks] addresses. turns: of each row, int32. IS_SENT: the
    previous kernel sent the parts.
    """
    DTYPE: tl.constexpr = parts.dtype.element_ty
    WORDS: tl.constexpr = tl.pointer_type(tl.int32)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    num_words = num_columns // 2
    mask = columns < num_words
    words = row * num_words + columns
    if residual is not None:  # the weight does not depend on the previous kernel
        eps = tl.load(epsilon)
        if weight.dtype.element_ty == tl.float32:
            low_scale = tl.load(weight + 2 * columns, mask=mask, other=0.0)
            high_scale = tl.load(weight + 2 * columns + 1, mask=mask, other=0.0)
        else:
            scales = tl.load(weight.to(WORDS, bitcast=True) + columns, mask=mask, other=0)
            low_scale, high_scale = unpacked(scales, DTYPE)
    addresses = addresses_of(inboxes, RANKS)
    if IS_SENT:
        start_next()  # the previous kernel has waited for all others before it let this one start
    else:
        start_next_and_wait()
    # These loads bypass L1: an earlier kernel wrote the values, and this one may not have waited for its end.
    turn = tl.load(turns + row, cache_modifier=".cg")
    if not IS_SENT:
        own = tl.load(parts.to(WORDS, bitcast=True) + words, mask=mask, other=0)[None, :]
    if residual is not None:  # not later: it would be read after the parts have arrived
        old = tl.load(residual.to(WORDS, bitcast=True) + words, mask=mask, other=0, cache_modifier=".cg")
    places, inside = words[None, :], mask[None, :]
    if not IS_SENT:
        send(own, places, inside, tl.zeros((1, 1), tl.int32) + turn, num_words, addresses, RANKS, False)
    senders = tl.arange(0, addresses.shape[0])[:, None]
    lines = line_of(senders, RANKS[0], turn, RANKS).to(tl.int64) * num_words
    inbox = tl.multiple_of(tl.load(inboxes + RANKS[0]).to(WORDS), 16)
    is_sent = (senders < RANKS[1]) & ((senders != RANKS[0]) | IS_SENT)
    found = received(inbox + lines + places, is_sent & inside)
    if not IS_SENT:
        found = tl.where(senders == RANKS[0], own, found)
    low_parts, high_parts = unpacked(found, DTYPE)
    low, high = tl.sum(low_parts, 0), tl.sum(high_parts, 0)
    if IS_SENT:
        wait()  # the next kernel relies on the end of all earlier ones
    tl.store(turns + row, 1 - turn)
    low_sum, high_sum = low.to(DTYPE), high.to(DTYPE)
    if residual is not None:
        low_old, high_old = unpacked(old, DTYPE)
        low_sum = (low_old + low_sum.to(tl.float32)).to(DTYPE)
        high_sum = (high_old + high_sum.to(tl.float32)).to(DTYPE)
        tl.store(residual.to(WORDS, bitcast=True) + words, packed(low_sum, high_sum), mask=mask)
        low, high = low_sum.to(tl.float32), high_sum.to(tl.float32)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(low * low + high * high, 0) / num_columns + eps)
        low, high = low * inverse, high * inverse
        if weight.dtype.element_ty != tl.float32:  # round before the product, too
            low, high = low.to(DTYPE).to(tl.float32), high.to(DTYPE).to(tl.float32)
        low_sum, high_sum = (low * low_scale).to(DTYPE), (high * high_scale).to(DTYPE)
    tl.store(out.to(WORDS, bitcast=True) + words, packed(low_sum, high_sum), mask=mask)


MANY_ROWS = 1024
"""From this number of rows on, programs of few threads are faster. Measured on two H200s."""
_sum = KernelLauncher(_sum_kernel)


class Inboxes:
    """The memory into which the ranks write their parts of sums [R, D] in 16 bits.

    Attributes:
        memory: of the inbox.
    """

    def __init__(self, rank: int, size: int, max_rows: int, num_columns: int, device: torch.device) -> None:
        """Allocate the inbox of this rank. Before the first sum, open ``memory``.

        Args:
            max_rows: maximum R of a sum.
            num_columns: D, an even number.
        """
        self._ranks, self._num_columns = (rank, size, max_rows), num_columns
        self._is_sent = False
        self._turns = torch.zeros(max_rows, dtype=torch.int32, device=device)
        num_lines = 2 * ((size - 1) * max_rows + MAX_SENT_ROWS.value)
        self.memory = SharedMemory(num_lines * num_columns * 2, device, filled=0xFF)

    def serves(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Return whether tensors of this shape can be added here."""
        return dtype.itemsize == 2 and shape[1:] == (self._num_columns,) and shape[0] <= self._ranks[2]

    def sender(self) -> Sender:
        """Return how a product sends its result [R, D] with R <= ``MAX_SENT_ROWS``. The next sum must be its sum."""
        self._is_sent = True
        return self.memory.addresses, self._turns, self._ranks

    def all_reduce(self, parts: Tensor) -> Tensor:
        """Return the sum over the ranks, rounded once: contiguous parts [R, D] -> [R, D]."""
        return self._sum(parts, None, None, None)

    def add_rms_norm(self, parts: Tensor, residual: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
        """Add the sum of the parts to the residual in place, contiguous [R, D] each, and return its RMS norm [R, D]."""
        return self._sum(parts, residual, weight, epsilon)

    def _sum(self, parts: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: Tensor | None) -> Tensor:
        """Return the sum of parts [R, D], or with a residual [R, D] the norm of both, as ``add_rms_norm`` [R, D]."""
        out = torch.empty_like(parts)
        num_rows, num_columns = parts.shape
        block = next_power_of_2(num_columns // 2)
        constants = self._ranks, self._is_sent, block
        self._is_sent = False
        arguments = (parts, residual, weight, out, num_columns, epsilon, self.memory.addresses, self._turns, *constants)
        aligned = alignments(parts, parts if residual is None else residual)
        key = (parts.dtype, None if weight is None else weight.dtype, num_columns, *constants, *aligned)
        num_warps = 4 if num_rows >= MANY_ROWS else min(max(block // 128, 1), 16)
        _sum((num_rows, 1, 1), (*key, num_warps), arguments, options(num_warps))
        return out
