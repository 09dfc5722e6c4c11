"""Receives the tensors that a training program broadcasts."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d  # as in ``layers.ranks``

from aioengine.layers.ranks import open_backend

TIMEOUT: Final = timedelta(seconds=300)
"""Maximum time until all have joined, and of a broadcast."""
_LOOPBACK: Final = ("127.", "localhost")
_DEVICES: Final = {"gloo": "cpu/", "nccl": "cuda/"}
"""Backend -> prefix of its keys in the store."""


class TrainerGroup:
    """The process group that a training program opens, to broadcast weights to the runners of an engine.

    The training program has rank 0.
    """

    def __init__(self, name: str, backend: str, address: str, port: int, *, rank: int, size: int) -> None:
        """Wait until all have joined.

        The keys in the store are those of ``torch.distributed``: of a new group in a ``PrefixStore`` with its name.

        Raises:
            RuntimeError: the program cannot be reached, or not all have joined in time.
        """
        store: Any = c10d.TCPStore(address, port, size, False, TIMEOUT)
        for prefix in (name, f"{name}/", _DEVICES[backend]):
            store = c10d.PrefixStore(prefix, store)
        hostname = "127.0.0.1" if address.startswith(_LOOPBACK) else ""
        is_on_cpu = backend == "gloo"
        self._backend = open_backend(store, rank, size, TIMEOUT, hostname=hostname, is_on_cpu=is_on_cpu)
        self._device = torch.device("cpu" if is_on_cpu else "cuda")

    def receive(self, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
        """Receive tensors [...] from rank 0, in this order. Return name -> tensor."""
        received = {name: torch.empty(shape, dtype=dtype, device=self._device) for name, dtype, shape in tensors}
        for work in [self._backend.broadcast(tensor, 0) for tensor in received.values()]:
            work.wait()
        return received
