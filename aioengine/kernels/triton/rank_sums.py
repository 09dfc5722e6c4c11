"""Sums over the ranks of tensor parallelism, on GPUs of one machine that can reach each other's memory.

A message (``rank_messages``) is one row of a rank's part of the sum. The rank writes it into the inboxes of all ranks,
which count the messages of each row. If there are few rows, each word has two values of 16 bits and the count. The
kernel that computes the parts can send them (``Inboxes.sender``). Then the kernel of the sum starts beside it, and only
waits and adds. If there are many rows, the words have only the two values, which halves the bytes, and a flag with the
count follows each row. Then a rank does not send to itself.

An inbox has two lines for a row of each rank, used in turns. A rank sends message n + 2 of a row after it has
received message n + 1, which the other rank sent after its kernel of message n had ended. So no message is overwritten
before it is read.

R rows, D columns, X words of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from aioengine.kernels.triton.dependent import start_next, start_next_and_wait, wait
from aioengine.kernels.triton.launcher import KernelLauncher, alignments, next_power_of_2, options
from aioengine.kernels.triton.rank_messages import SharedMemory, addresses_of, message, packed, received, unpacked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from aioengine.kernels.triton.rank_messages import Sender


@triton.jit
def _sum_kernel(
    parts: tl.tensor, residual: tl.tensor, weight: tl.tensor, out: tl.tensor, num_columns: tl.tensor,
    epsilon: tl.tensor, inboxes: tl.tensor, flags_offset: tl.tensor, counts: tl.tensor,
    RANKS: tl.constexpr, HAS_FLAGS: tl.constexpr, IS_SENT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Store the sum of a row over the ranks. With a residual, add the sum to it, and store its RMS norm instead.

    parts, residual, out: [R, D]; weight: [D]. inboxes: [ranks] addresses of the inboxes, each with lines
    [2, senders, MAX_ROWS, X]; with flags, the owner of the inbox is no sender. flags_offset: of the flags of these
    lines, int32. counts: [MAX_ROWS] int32, the messages of each row so far. IS_SENT: the previous kernel sent the
    parts.
    """
    RANK: tl.constexpr = RANKS[0]
    SIZE: tl.constexpr = RANKS[1]
    MAX_ROWS: tl.constexpr = RANKS[2]
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
    count = tl.load(counts + row) + 1
    if not IS_SENT:
        own = tl.load(parts.to(WORDS, bitcast=True) + words, mask=mask, other=0)
    if residual is not None:  # not later: it would be read after the messages have arrived
        old = tl.load(residual.to(WORDS, bitcast=True) + words, mask=mask, other=0)
    # After 2 ** 31 messages, counts are negative: then ``%`` would be, too.
    place = (count & 1) * ((SIZE - HAS_FLAGS) * MAX_ROWS) + row
    if HAS_FLAGS:
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                line = place + (RANK - (peer < RANK)) * MAX_ROWS
                inbox = tl.multiple_of(tl.load(inboxes + peer).to(WORDS), 16)
                tl.store(inbox + line * num_words + columns, own, mask=mask)
                tl.debug_barrier()  # all threads must have stored before one sets the flag
                flag = (tl.load(inboxes + peer) + flags_offset).to(WORDS) + line
                tl.atomic_xchg(flag, count, sem="release", scope="sys")
        own_inbox = tl.multiple_of(tl.load(inboxes + RANK).to(WORDS), 16)
        low = tl.zeros((BLOCK,), tl.float32)
        high = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(SIZE):
            words_of_peer = own
            if peer != RANK:
                line = place + (peer - (peer > RANK)) * MAX_ROWS
                flag = (tl.load(inboxes + RANK) + flags_offset).to(WORDS) + line
                while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != count:
                    pass
                tl.debug_barrier()
                words_of_peer = tl.load(own_inbox + line * num_words + columns, mask=mask, other=0, volatile=True)
            low_part, high_part = unpacked(words_of_peer, DTYPE)
            low += low_part
            high += high_part
    else:
        if not IS_SENT:
            inbox = tl.multiple_of(addresses.to(tl.pointer_type(tl.int64)), 16)[:, None]
            line = place + RANK * MAX_ROWS
            is_peer = (tl.arange(0, addresses.shape[0]) < SIZE)[:, None] & mask[None, :]
            tl.store(inbox + line * num_words + columns[None, :], message(own, count)[None, :], mask=is_peer)
        senders = tl.arange(0, addresses.shape[0])[:, None]
        own_inbox = tl.multiple_of(tl.load(inboxes + RANK).to(tl.pointer_type(tl.int64)), 16)
        lines = own_inbox + (place + senders * MAX_ROWS) * num_words + columns[None, :]
        low_parts, high_parts = unpacked(received(lines, (senders < SIZE) & mask[None, :], count), DTYPE)
        low, high = tl.sum(low_parts, 0), tl.sum(high_parts, 0)
    if IS_SENT:
        wait()  # the next kernel relies on the end of all earlier ones
    tl.store(counts + row, count)
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

    def __init__(
        self,
        rank: int,
        size: int,
        max_rows: int,
        num_columns: int,
        *,
        has_flags: bool,
        device: torch.device,
    ) -> None:
        """Allocate the inbox of this rank. Before the first sum, open ``memory``.

        Args:
            max_rows: maximum R of a sum.
            num_columns: D, an even number.
            has_flags: for many rows: words without counts, and a flag for each row.
        """
        self._ranks = rank, size, max_rows
        self._num_columns, self._has_flags = num_columns, has_flags
        self._is_sent = False
        num_lines = 2 * (size - has_flags) * max_rows
        self._lines_bytes = num_lines * (num_columns // 2) * (4 if has_flags else 8)
        self._counts = torch.zeros(max_rows, dtype=torch.int32, device=device)
        # the flags, of 4 bytes each, are behind the lines
        self.memory = SharedMemory(self._lines_bytes + 4 * num_lines, device)

    def serves(self, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """Return whether tensors of this shape can be added here."""
        return dtype.itemsize == 2 and shape[1:] == (self._num_columns,) and shape[0] <= self._ranks[2]

    def sender(self) -> Sender:
        """Return how a product sends its result [R, D]. Its sum must be the next sum here."""
        self._is_sent = True
        return self.memory.addresses, self._counts, self._ranks

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
        constants = self._ranks, self._has_flags, self._is_sent, block
        self._is_sent = False
        memory = self.memory.addresses, self._lines_bytes, self._counts
        arguments = (parts, residual, weight, out, num_columns, epsilon, *memory, *constants)
        aligned = alignments(parts, parts if residual is None else residual)
        key = (parts.dtype, None if weight is None else weight.dtype, num_columns, *constants, *aligned)
        num_warps = 4 if num_rows >= MANY_ROWS else min(max(block // 128, 1), 16)
        _sum((num_rows, 1, 1), (*key, num_warps), arguments, options(num_warps))
        return out
