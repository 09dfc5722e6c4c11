"""Receives the tensors that a training program broadcasts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Final

import msgspec
import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d  # as in ``layers.ranks``

from aioengine.layers.ranks import open_backend
from aioengine.model_files import tensor_file
from aioengine.model_files.tensor_file import TensorFile
from aioengine.protocol.messages import Argument
from aioengine.protocol.weight_messages import RefusedError
from aioengine.runner.weight_reading import DTYPES
from aioengine.settings.config import RankSettings, RunnerSettings

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


class TrainerGroups:
    """The groups of a runner by name, and the tensors that it received last.

    Attributes:
        received: name -> tensor [...]; None after they were loaded.
    """

    def __init__(self, runner: RunnerSettings) -> None:
        ranks = runner.ranks or RankSettings(size=1)
        self._rank = ranks.rank
        self._number = runner.replica * ranks.size + ranks.rank  # of this runner in the engine
        self._groups: dict[str, TrainerGroup] = {}
        self.received: dict[str, Tensor] | None = None
        self._file: TensorFile | None = None

    def join(self, arguments: Mapping[str, Argument]) -> None:
        """Join a group (``WeightCall.JOIN_GROUP``)."""
        name, backend, address = (str(arguments[key]) for key in ("group", "backend", "address"))
        offset, size, port = (int(str(arguments[key])) for key in ("rank_offset", "world_size", "port"))
        rank = offset + self._number
        if name in self._groups:
            raise RefusedError(f"the engine is in a group {name!r} already; destroy it first")
        if backend == "nccl" and not torch.cuda.is_available():
            raise RefusedError("backend='nccl' needs a GPU; backend='gloo' works")
        try:
            self._groups[name] = TrainerGroup(name, backend, address, port, rank=rank, size=size)
        except RuntimeError as error:
            raise RefusedError(f"rank {rank} could not join the group at {address}:{port}: {error}") from error

    def leave(self, arguments: Mapping[str, Argument]) -> None:
        """Leave a group (``WeightCall.LEAVE_GROUP``)."""
        del self._groups[self._joined(arguments)]

    def receive(self, arguments: Mapping[str, Argument]) -> dict[str, Tensor]:
        """Receive tensors in a group (``WeightCall.RECEIVE``). Return name -> tensor [...].

        Raises:
            RuntimeError: a broadcast has failed.
        """
        group = self._groups[self._joined(arguments)]
        sent = msgspec.json.decode(str(arguments["tensors"]), type=list[tuple[str, str, tuple[int, ...]]])
        return group.receive((name, DTYPES[dtype], shape) for name, dtype, shape in sent)

    def keep(self, tensors: dict[str, Tensor], *, in_file: bool) -> str | None:
        """Keep received tensors [...] until they are loaded.

        in_file: rank 0 also writes them to a file, which another process opens. Return its path.
        """
        self.forget_received()
        self.received = tensors
        if in_file and self._rank == 0:
            self._file = tensor_file.write(tensors)
        return None if self._file is None else self._file.path

    def forget_received(self) -> None:
        """Free the received tensors, and close their file."""
        if self._file is not None:
            self._file.close()
        self.received, self._file = None, None

    def _joined(self, arguments: Mapping[str, Argument]) -> str:
        """Return the name of the group of a call. Refuse the call if the engine is not in it."""
        name = str(arguments["group"])
        if name not in self._groups:
            hint = "call init_weights_update_group (again, if its process was replaced)"
            raise RefusedError(f"the engine is in no group {name!r}; {hint}")
        return name
