"""The parts of sums over the ranks of tensor parallelism, in the inboxes of all ranks.

A part is one row of a rank, in words of two values of 16 bits. A word of an inbox is ``EMPTY`` until its part arrives.
The receiver reads the words until none is empty, and empties them again. So the ranks need no other signal.

An inbox has two lines for a row of each rank, used in turns. A rank sends part n + 2 of a row after it has received
part n + 1, which the other rank sent after its kernel that received part n had ended. So the line of part n + 2 is
empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

EMPTY = tl.constexpr(-1)
"""Two NaN. They are sent as another NaN."""
_NAN = tl.constexpr(0x7FFF7FFF)
MAX_SENT_ROWS = tl.constexpr(64)
"""A rank sends up to this number of rows also to itself (``Inboxes.sender``)."""

Ranks = tuple[int, int, int]
"""(rank, number of ranks, maximum rows)"""
Sender = tuple["Tensor | None", "Tensor | None", Ranks | None]
"""How a kernel sends its result: ``SharedMemory.addresses`` of the inboxes, the turn of each row (0 or 1), int32."""
NO_SENDER: Sender = (None, None, None)


@triton.jit
def unpacked(words: tl.tensor, DTYPE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the values in the low and the high half of int32 words [...], as fp32."""
    low = (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def packed(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Return int32 words [...] with two values of 16 bits each."""
    low_bits = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low_bits | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def addresses_of(inboxes: tl.tensor, RANKS: tl.constexpr) -> tl.tensor:
    """Return the addresses of the inboxes of all ranks [P], padded to a power of 2."""
    ranks = tl.arange(0, triton.next_power_of_2(RANKS[1]))
    return tl.load(inboxes + ranks, mask=ranks < RANKS[1], other=0)


@triton.jit
def line_of(sender: tl.tensor, owner: tl.tensor, turn: tl.tensor, RANKS: tl.constexpr) -> tl.tensor:
    """Return the line of row 0 of a sender in the inbox of an owner."""
    of_other = (turn * (RANKS[1] - 1) + sender - (sender > owner).to(tl.int32)) * RANKS[2]
    of_owner = 2 * (RANKS[1] - 1) * RANKS[2] + turn * MAX_SENT_ROWS
    return tl.where(sender == owner, of_owner, of_other)


@triton.jit
def send(
    words: tl.tensor, places: tl.tensor, inside: tl.tensor, turns: tl.tensor, num_words: tl.tensor,
    addresses: tl.tensor, RANKS: tl.constexpr, TO_ITSELF: tl.constexpr,
) -> None:  # fmt: skip
    """Send words [A, B] of rows to the other ranks, and perhaps to this rank.

    places: [A, B], index of each word in lines that begin at row 0. inside: [A, B], the words to send. turns: [A, 1],
    of the rows. num_words: of a row.
    """
    ranks = tl.arange(0, addresses.shape[0])[:, None, None]
    lines = line_of(RANKS[0], ranks, turns[None, :, :], RANKS).to(tl.int64) * num_words
    inboxes = tl.multiple_of(addresses.to(tl.pointer_type(tl.int32)), 16)[:, None, None]
    is_receiver = (ranks < RANKS[1]) & ((ranks != RANKS[0]) | TO_ITSELF)
    sent = tl.where(words == EMPTY, _NAN, words)[None, :, :]
    tl.store(inboxes + lines + places[None, :, :], sent, mask=is_receiver & inside[None, :, :])


@triton.jit
def send_tile(
    values: tl.tensor, is_row: tl.tensor, turns: tl.tensor, rows: tl.tensor, first: tl.tensor, num_columns: tl.tensor,
    addresses: tl.tensor, RANKS: tl.constexpr,
) -> None:  # fmt: skip
    """Send values [A, B] in 16 bits of the columns from ``first``, an even number, also to this rank.

    is_row: the rows to send. turns, rows: of the values. [A, 1] each.
    """
    WIDTH: tl.constexpr = values.shape[1] // 2
    low, high = tl.split(tl.reshape(values, (values.shape[0], WIDTH, 2)))
    columns, num_words = first // 2 + tl.arange(0, WIDTH)[None, :], num_columns // 2
    inside = is_row & (columns < num_words)
    send(packed(low, high), rows * num_words + columns, inside, turns, num_words, addresses, RANKS, True)


@triton.jit
def received(words: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Wait until no word [...] is empty, empty them, and return them."""
    found = tl.load(words, mask=mask, other=0, volatile=True)
    while tl.max((found == EMPTY).to(tl.int32)) != 0:
        found = tl.load(words, mask=mask, other=0, volatile=True)
    tl.store(words, EMPTY, mask=mask)
    return found
