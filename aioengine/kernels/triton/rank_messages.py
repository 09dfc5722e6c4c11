"""Messages between the ranks of tensor parallelism, in memory of their GPUs that all of them can reach.

A word of a message has a value of 32 bits and the number of the message, as in NCCL's protocol LL. The receiver reads
the words until all have the expected number. So the ranks need no other signal, and a message takes as long as one
transfer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Handle = tuple[object, ...]
"""The CUDA IPC handle of a storage: the arguments of ``UntypedStorage._new_shared_cuda`` between first and last."""


@triton.jit
def message(values: tl.tensor, number: tl.tensor) -> tl.tensor:
    """Return int64 words [...] with int32 values [...] and the number of the message."""
    return (values.to(tl.int64) & 0xFFFFFFFF) | (number.to(tl.int64) << 32)


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
    """Return the addresses of the inboxes of all ranks, for ``send_tile``. RANKS: rank, size, maximum rows."""
    ranks = tl.arange(0, triton.next_power_of_2(RANKS[1]))
    return tl.load(inboxes + ranks, mask=ranks < RANKS[1], other=0)


@triton.jit
def send_tile(
    values: tl.tensor, inside: tl.tensor, numbers: tl.tensor, rows: tl.tensor, first: tl.tensor, num_columns: tl.tensor,
    addresses: tl.tensor, RANKS: tl.constexpr,
) -> None:  # fmt: skip
    """Send values [A, B] in 16 bits to all ranks, this one included: B columns from ``first``, even numbers, of the
    messages ``numbers`` [A, 1] of ``rows`` [A, 1]. inside: [A, 1], the rows to send. addresses: of ``addresses_of``.
    """
    HEIGHT: tl.constexpr = values.shape[0]
    WIDTH: tl.constexpr = values.shape[1] // 2
    low, high = tl.split(tl.reshape(values, (HEIGHT, WIDTH, 2)))
    words = message(packed(low, high), numbers)
    line = ((numbers & 1) * RANKS[1] + RANKS[0]) * RANKS[2] + rows
    columns = first // 2 + tl.arange(0, WIDTH)[None, :]
    places = line * (num_columns // 2) + columns
    inside &= columns < num_columns // 2
    is_rank = tl.arange(0, addresses.shape[0]) < RANKS[1]
    inboxes = tl.multiple_of(addresses.to(tl.pointer_type(tl.int64)), 16)
    mask = is_rank[:, None, None] & inside[None, :, :]
    tl.store(inboxes[:, None, None] + places[None, :, :], words[None, :, :], mask=mask)


@triton.jit
def received(words: tl.tensor, mask: tl.tensor, number: tl.tensor) -> tl.tensor:
    """Wait for the words [...] of the messages with this number, and return their int32 values [...]."""
    found = tl.load(words, mask=mask, other=0, volatile=True)
    while tl.max((mask & ((found >> 32) != number)).to(tl.int32)) != 0:
        found = tl.load(words, mask=mask, other=0, volatile=True)
    return found.to(tl.int32)


Sender = tuple["Tensor | None", "Tensor | None", tuple[int, int, int] | None]
"""How a kernel sends its result: ``SharedMemory.addresses`` of the inboxes, [rows] int32 messages of each row so far,
and (rank, size, maximum rows).
"""
NO_SENDER: Sender = (None, None, None)


class SharedMemory:
    """Memory of this rank [X] that the other ranks can reach, and the addresses of the memory of all ranks.

    Attributes:
        num_bytes: X. addresses: [ranks] int64, after ``open``.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate zeros. Before their first use, ``open`` the memory of all ranks."""
        self.num_bytes = num_bytes
        self._own = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)  # it must be zeros before another rank writes

    def share(self) -> Handle:
        """Return the handle of this memory. Raises RuntimeError if this GPU cannot share it."""
        _device, *handle, _must_wait = self._own.untyped_storage()._share_cuda_()
        return tuple(handle)

    def open(self, handles: Sequence[Handle], rank: int) -> None:
        """Open the memory of all ranks, in order. Raises RuntimeError if this GPU cannot reach it."""
        self._opened = [self._own if other == rank else _opened(handle) for other, handle in enumerate(handles)]
        self.addresses = torch.tensor([memory.data_ptr() for memory in self._opened], device=self._own.device)


def _opened(handle: Handle) -> Tensor:
    """Return the bytes [X] of another rank. Their memory is on that rank's GPU, although their device is ours."""
    must_wait = False  # for an event of the owner
    memory = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *handle, must_wait)
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(memory, 0, (memory.nbytes(),))
