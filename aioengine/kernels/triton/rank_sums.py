"""Sums over the ranks of tensor parallelism, on GPUs of one machine that can reach each other's memory.

A part is one row of a rank, in words of two values of 16 bits. Each rank writes its part into the inboxes of all
others. A word of an inbox is ``EMPTY`` until it arrives. The receiver reads the words until none is empty, and empties
them again. So the ranks need no other signal, and a part takes as long as one transfer.

An inbox has two lines for a row of each other rank, used in turns. A rank sends part n + 2 of a row after it has
received part n + 1, which the other rank sent after its kernel of part n had ended. So that line is empty then.

A program has one row. All ranks add the parts in fp32 in the same order, so they get the same bits.

R rows, D columns, X words of a row, P ranks padded to a power of 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from aioengine.kernels.triton.dependent import start_next_and_wait
from aioengine.kernels.triton.launcher import alignments, dtypes, kernel, next_power_of_2, options
from aioengine.kernels.triton.rank_messages import SharedMemory

if TYPE_CHECKING:
    from torch import Tensor

EMPTY = tl.constexpr(-1)
"""A word of two NaN. A rank that has such a word sends ``NAN`` instead."""
NAN = tl.constexpr(0x7FFF7FFF)


@triton.jit
def _unpacked(words: tl.tensor, DTYPE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the values in the low and the high half of int32 words [...], as fp32."""
    low = (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _packed(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Return int32 words [X] with two values of 16 bits each."""
    low_bits = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low_bits | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _received(words: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Wait until no word [P, X] is empty, empty them, and return them."""
    found = tl.load(words, mask=mask, other=0, volatile=True)
    while tl.max((found == EMPTY).to(tl.int32)) != 0:
        found = tl.load(words, mask=mask, other=0, volatile=True)
    tl.store(words, EMPTY, mask=mask)
    return found


@kernel()
def _sum_kernel(
    parts: tl.tensor, residual: tl.tensor, weight: tl.tensor, out: tl.tensor, num_columns: tl.tensor,
    epsilon: tl.tensor, inboxes: tl.tensor, turns: tl.tensor,
    RANK: tl.constexpr, SIZE: tl.constexpr, MAX_ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store the sum of a row over the ranks. With a residual, add the sum to it, and store its RMS norm instead.

    parts, residual, out: [R, D]; weight: [D]. inboxes: [SIZE] addresses of the inboxes, each with lines
    [2, SIZE - 1, MAX_ROWS, X]: the second axis is the sender, without the owner of the inbox. turns: [MAX_ROWS] int32,
    the next of the two lines of each row.
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
            low_scale, high_scale = _unpacked(scales, DTYPE)
    ranks = tl.arange(0, triton.next_power_of_2(SIZE))
    addresses = tl.multiple_of(tl.load(inboxes + ranks, mask=ranks < SIZE, other=0).to(WORDS), 16)
    own_inbox = tl.multiple_of(tl.load(inboxes + RANK).to(WORDS), 16)
    start_next_and_wait()
    turn = tl.load(turns + row)
    own = tl.load(parts.to(WORDS, bitcast=True) + words, mask=mask, other=0)[None, :]
    if residual is not None:  # not later: it would be read after the parts have arrived
        old = tl.load(residual.to(WORDS, bitcast=True) + words, mask=mask, other=0)
    peers = ranks[:, None]
    inside = (peers < SIZE) & (peers != RANK) & mask[None, :]
    first_line = turn * (SIZE - 1) * MAX_ROWS + row
    sent_lines = first_line + (RANK - (peers < RANK).to(tl.int64)) * MAX_ROWS
    places = sent_lines * num_words + columns[None, :]
    tl.store(addresses[:, None] + places, tl.where(own == EMPTY, NAN, own), mask=inside)
    lines = first_line + (peers - (peers > RANK).to(tl.int64)) * MAX_ROWS
    found = _received(own_inbox + lines * num_words + columns[None, :], inside)
    low_parts, high_parts = _unpacked(tl.where(peers == RANK, own, found), DTYPE)
    low, high = tl.sum(low_parts, 0), tl.sum(high_parts, 0)
    tl.store(turns + row, 1 - turn)
    low_sum, high_sum = low.to(DTYPE), high.to(DTYPE)
    if residual is not None:
        low_old, high_old = _unpacked(old, DTYPE)
        low_sum = (low_old + low_sum.to(tl.float32)).to(DTYPE)
        high_sum = (high_old + high_sum.to(tl.float32)).to(DTYPE)
        tl.store(residual.to(WORDS, bitcast=True) + words, _packed(low_sum, high_sum), mask=mask)
        low, high = low_sum.to(tl.float32), high_sum.to(tl.float32)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(low * low + high * high, 0) / num_columns + eps)
        low, high = low * inverse, high * inverse
        if weight.dtype.element_ty != tl.float32:  # round before the product, too
            low, high = low.to(DTYPE).to(tl.float32), high.to(DTYPE).to(tl.float32)
        low_sum, high_sum = (low * low_scale).to(DTYPE), (high * high_scale).to(DTYPE)
    tl.store(out.to(WORDS, bitcast=True) + words, _packed(low_sum, high_sum), mask=mask)


SMALL_PROGRAM_ROWS = 1024
"""From this number of rows on, programs of few threads are faster. Measured on two H200s."""


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
        self._rank, self._size = rank, size
        self._max_rows, self._num_columns = max_rows, num_columns
        self._turns = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.memory = SharedMemory(2 * (size - 1) * max_rows * num_columns * 2, device, filled=0xFF)

    def supports(self, parts: Tensor) -> bool:
        """Return whether ``parts`` [...] can be added here."""
        has_columns = parts.dtype.itemsize == 2 and parts.shape[1:] == (self._num_columns,)
        return has_columns and len(parts) <= self._max_rows

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
        constants = self._rank, self._size, self._max_rows, block
        arguments = (parts, residual, weight, out, num_columns, epsilon, self.memory.addresses, self._turns, *constants)
        key = (*dtypes(parts, weight), num_columns, *constants, *alignments(parts, residual))
        num_warps = 4 if num_rows >= SMALL_PROGRAM_ROWS else min(max(block // 128, 1), 16)
        _sum_kernel((num_rows, 1, 1), (*key, num_warps), arguments, options(num_warps))
        return out
