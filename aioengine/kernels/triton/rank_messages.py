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
def received(words: tl.tensor, mask: tl.tensor, number: tl.tensor) -> tl.tensor:
    """Wait for the words [X] of the message with this number, and return their int32 values [X]."""
    found = tl.load(words, mask=mask, other=0, volatile=True)
    while tl.max((mask & ((found >> 32) != number)).to(tl.int32), 0) != 0:
        found = tl.load(words, mask=mask, other=0, volatile=True)
    return found.to(tl.int32)


class SharedMemory:
    """Memory of this rank [X] that the other ranks can reach, and the addresses of the memory of all ranks.

    Attributes:
        num_bytes: X. addresses: [ranks] int64, after ``open``.
    """

    def __init__(self, num_bytes: int, device: torch.device, *, filled: int = 0) -> None:
        """Allocate bytes of this value. Before their first use, ``open`` the memory of all ranks."""
        self.num_bytes = num_bytes
        self._own = torch.full((num_bytes,), filled, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)  # it must be filled before another rank writes

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
