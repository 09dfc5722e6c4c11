"""The ranks of tensor parallelism, and their collective operations.

All ranks call the same operations in the same order. An operation ends only when all ranks have called it. The results
have the same bits on all ranks.

Shape letters: T tokens, S tokens that are sampled, D hidden size, W outputs of a rank.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
from torch._C import _distributed_c10d as c10d  # the objects behind torch.distributed, without its global state

from aioengine.kernels.norms import add_rms_norm

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.kernels.triton.rank_messages import Handle, SharedMemory
    from aioengine.kernels.triton.rank_sums import Inboxes
    from aioengine.kernels.triton.sampling import RankSampling

_LOOPBACK: Final = "127.0.0.1"
_NO_TIMEOUT: Final = timedelta(days=7)
"""The supervisor detects ranks that end or stall, and replaces all of them."""
_FEW_ROWS: Final = 32
"""With more than two ranks: maximum rows of a sum in ``Inboxes``, times the number of other ranks."""


def open_backend(store: c10d.Store, rank: int, size: int, timeout: timedelta, *, hostname: str, is_on_cpu: bool) -> Any:
    """Join a process group. hostname: of the network interface for gloo, on a CPU; "": the default one."""
    if not is_on_cpu:
        nccl_options = c10d.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        return c10d.ProcessGroupNCCL(store, rank, size, nccl_options)
    gloo: Any = c10d.ProcessGroupGloo  # its options are not in torch's stubs
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=hostname) if hostname else gloo.create_default_device()]
    options._timeout = timeout
    return gloo(store, rank, size, options)


class RankGroup:
    """This process in the group of all ranks: gloo on a CPU; NCCL on GPUs, and own kernels for sums of hidden states.

    Attributes:
        rank: the index of this process. size: the number of ranks.
        sampling: samples from the logits of all ranks without gathering them; None: the GPUs cannot reach each other's
            memory.
    """

    def __init__(self, rank: int, size: int, *, store_file: str, device: torch.device, batch_invariant: bool) -> None:
        """Wait for the other ranks.

        Args:
            store_file: path of the file in which the ranks exchange their addresses. It must not exist yet.
            device: of the tensors.
            batch_invariant: the sum of an element must not depend on its place in the tensor.
        """
        self.rank, self.size = rank, size
        self._device = device
        self._batch_invariant = batch_invariant
        self._inboxes: Inboxes | None = None
        self.sampling: RankSampling | None = None
        self._store = store = c10d.FileStore(store_file, size)
        self._backend = open_backend(store, rank, size, _NO_TIMEOUT, hostname=_LOOPBACK, is_on_cpu=device.type == "cpu")
        self.all_reduce_min(0)  # the first operation connects the ranks

    def open_inboxes(
        self, max_rows: int, num_columns: int, dtype: torch.dtype, *, max_sampled_rows: int = 0, num_embeddings: int = 0
    ) -> None:
        """Use own kernels for sums [T, num_columns] of up to ``max_rows`` rows, and to sample up to
        ``max_sampled_rows`` rows of logits, if the GPUs reach each other's memory.

        Each rank sends its rows to all others. So with more than two ranks, sums of many rows are left to NCCL, which
        moves fewer bytes.
        """
        if self._device.type == "cpu":
            return
        from aioengine.kernels.triton.rank_sums import Inboxes

        inboxes, sampling = None, None
        memory: list[SharedMemory] = []
        if dtype.itemsize == 2 and num_columns % 2 == 0:
            num_rows = max_rows if self.size == 2 else _FEW_ROWS // (self.size - 1)
            inboxes = Inboxes(self.rank, self.size, num_rows, num_columns, self._device)
            memory.append(inboxes.memory)
        if max_sampled_rows:
            from aioengine.kernels.triton.sampling import RankSampling

            sizes = {"max_rows": max_sampled_rows, "num_embeddings": num_embeddings}
            sampling = RankSampling(self.rank, self.size, **sizes, device=self._device)
            memory.append(sampling.memory)
        own_handles: list[Handle] = []
        is_open = False
        with suppress(RuntimeError):
            own_handles = [own.share() for own in memory]
        handles_of_ranks = self._exchange(own_handles)  # also without handles: the other ranks wait for them
        with suppress(RuntimeError):
            if all(handles_of_ranks):
                for own, *handles in zip(memory, *handles_of_ranks, strict=True):
                    own.open(handles, self.rank)
                is_open = True
        if self.all_reduce_min(is_open):
            self._inboxes, self.sampling = inboxes, sampling

    def _exchange(self, own: list[Handle]) -> list[list[Handle]]:
        """Give the handles of this rank to all ranks, and return the handles of each rank, in order."""
        self._store.set(f"inboxes {self.rank}", msgspec.msgpack.encode(own))  # pyright: ignore[reportArgumentType]
        stored = [self._store.get(f"inboxes {rank}") for rank in range(self.size)]
        return [msgspec.msgpack.decode(handles, type=list[tuple[object, ...]]) for handles in stored]

    def _inboxes_for(self, parts: Tensor) -> Inboxes | None:
        """Return the inboxes if they can add ``parts`` [...]; None: NCCL or gloo adds them."""
        inboxes = self._inboxes
        return inboxes if inboxes is not None and inboxes.supports(parts) else None

    def add_rms_norm(self, parts: Tensor, residual: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
        """Add the sum of ``parts`` over the ranks to the residual in place, [T, D] each, and return the norm of the
        result [T, D]. weight [D], epsilon [] fp32.
        """
        inboxes = None if self._batch_invariant else self._inboxes_for(parts)
        if inboxes is not None:  # this norm may be rounded differently from the one after an all-reduce
            return inboxes.add_rms_norm(parts, residual, weight, epsilon)
        return add_rms_norm(self.all_reduce(parts), residual, weight, epsilon)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x [...] over the ranks, in place or in new memory."""
        x = x.contiguous()
        if (inboxes := self._inboxes_for(x)) is not None:
            return inboxes.all_reduce(x)
        if self.size == 2 or not self._batch_invariant:
            _wait(self._backend.allreduce([x], _on_stream(c10d.AllreduceOptions())))
            return x
        # NCCL and gloo divide the tensor, and add up each part in another order of the ranks.
        first, *others = self._parts(x)
        total = first.float()
        for part in others:
            total = total + part
        return x.copy_(total)

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the outputs of all ranks, in order: x [S, W] of each rank -> [S, size * W]."""
        return torch.cat([*self._parts(x)], dim=1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Return x [...] of rank 0, in place."""
        _wait(self._backend.broadcast([x], _on_stream(c10d.BroadcastOptions())))
        return x

    def _parts(self, x: Tensor) -> Tensor:
        """Return x [...] of all ranks: [size, ...]."""
        parts = x.new_empty(self.size, *x.shape)
        options = _on_stream(c10d.AllgatherOptions())
        _wait(self._backend._allgather_base(parts.flatten(0, 1), x.contiguous(), options))
        return parts

    def all_reduce_min(self, number: int) -> int:
        """Return the smallest number of all ranks."""
        numbers = self.all_gather(torch.tensor([[number]], dtype=torch.int64, device=self._device))
        return int(numbers.min())


def _on_stream(options: Any) -> Any:
    """Queue the operation on the current stream of a GPU, instead of a stream of its own."""
    options.asyncOp = False
    return options


def _wait(work: Any) -> None:
    """Wait for an operation. None: it is queued on the current stream."""
    if work is not None:
        work.wait()
