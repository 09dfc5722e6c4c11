"""The process group that a training program opens, to broadcast weights to the runners of an engine."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C import _distributed_c10d as c10d  # as in ``layers.ranks``

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

TIMEOUT: Final = timedelta(seconds=300)
"""Maximum time until all have joined, and of a broadcast."""
_LOOPBACK: Final = ("127.", "localhost")
_DEVICES: Final = {"gloo": "cpu/", "nccl": "cuda/"}
"""Backend -> prefix of its keys in the store."""


class TrainerGroup:
    """This runner in the group. The training program has rank 0."""

    def __init__(self, name: str, backend: str, address: str, port: int, *, rank: int, size: int) -> None:
        """Wait until all have joined.

        The keys in the store are those of ``torch.distributed``: of a new group in a ``PrefixStore`` with its name.

        Raises:
            RuntimeError: the program cannot be reached, or not all have joined in time.
        """
        store: Any = c10d.TCPStore(address, port, size, False, TIMEOUT)
        for prefix in (name, f"{name}/", _DEVICES[backend]):
            store = c10d.PrefixStore(prefix, store)
        if backend == "gloo":
            gloo: Any = c10d.ProcessGroupGloo
            options = gloo._Options()
            host = {"hostname": "127.0.0.1"} if address.startswith(_LOOPBACK) else {}
            options._devices = [gloo.create_device(**host) if host else gloo.create_default_device()]
            options._timeout = TIMEOUT
            self._backend: Any = gloo(store, rank, size, options)
        else:
            nccl_options = c10d.ProcessGroupNCCL.Options()
            nccl_options._timeout = TIMEOUT
            self._backend = c10d.ProcessGroupNCCL(store, rank, size, nccl_options)
        self._device = torch.device("cpu" if backend == "gloo" else "cuda")

    def receive(self, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
        """Receive tensors [...] from rank 0, in this order. Return name -> tensor."""
        received = {name: torch.empty(shape, dtype=dtype, device=self._device) for name, dtype, shape in tensors}
        for work in [self._backend.broadcast(tensor, 0) for tensor in received.values()]:
            work.wait()
        return received
