"""The ranks of tensor parallelism, and their collective operations.

All ranks call the same operations in the same order. An operation ends only when all ranks have called it. The results
have the same bits on all ranks.

Shape letters: S tokens, W outputs of a rank.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C import _distributed_c10d as c10d  # the objects behind torch.distributed, without its global state

if TYPE_CHECKING:
    from torch import Tensor

_LOOPBACK: Final = "127.0.0.1"
_NO_TIMEOUT: Final = timedelta(days=7)
"""The supervisor detects ranks that end or stall, and replaces all of them."""


class RankGroup:
    """This process in the group of all ranks: gloo on a CPU, NCCL on GPUs.

    Attributes:
        rank: the index of this process. size: the number of ranks.
    """

    def __init__(
        self, rank: int, size: int, *, store_file: str, device: torch.device, batch_invariant: bool = True
    ) -> None:
        """Wait for the other ranks.

        Args:
            store_file: path of the file in which the ranks exchange their addresses. It must not exist yet.
            device: of the tensors.
            batch_invariant: the sum of an element must not depend on its place in the tensor.
        """
        self.rank, self.size = rank, size
        self._device = device
        self._sums_in_rank_order = size > 2 and batch_invariant
        store = c10d.FileStore(store_file, size)
        if device.type == "cpu":
            gloo = c10d.ProcessGroupGloo
            options = gloo._Options()  # pyright: ignore[reportAttributeAccessIssue]  # not in torch's stubs
            options._devices = [gloo.create_device(hostname=_LOOPBACK)]
            options._timeout = _NO_TIMEOUT
            self._backend: Any = gloo(store, rank, size, options)  # pyright: ignore[reportCallIssue]
        else:
            nccl_options = c10d.ProcessGroupNCCL.Options()
            nccl_options._timeout = _NO_TIMEOUT
            self._backend = c10d.ProcessGroupNCCL(store, rank, size, nccl_options)
        self.all_reduce_min(0)  # the first operation connects the ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x [...] over the ranks, in place if x is contiguous."""
        x = x.contiguous()
        if not self._sums_in_rank_order:
            self._backend.allreduce(x).wait()
            return x
        # The all-reduce of the backend divides a tensor, and adds up each part in another order of the ranks.
        first, *others = self._parts(x)
        total = first.float()
        for part in others:
            total = total + part
        return x.copy_(total)

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the outputs of all ranks, in order: x [S, W] of each rank -> [S, size * W]."""
        return self._parts(x).transpose(0, 1).flatten(1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Return x [...] of rank 0, in place."""
        self._backend.broadcast(x, 0).wait()
        return x

    def _parts(self, x: Tensor) -> Tensor:
        """Return x [S, ...] of all ranks: [size, S, ...]."""
        parts = x.new_empty(self.size, *x.shape)
        self._backend._allgather_base(parts.flatten(0, 1), x.contiguous()).wait()
        return parts

    def all_reduce_min(self, number: int) -> int:
        """Return the smallest number of all ranks."""
        numbers = self.all_gather(torch.tensor([[number]], dtype=torch.int64, device=self._device))
        return int(numbers.min())
