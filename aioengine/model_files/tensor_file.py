"""Tensors in safetensors files in memory, which the processes of an engine open by a path in /proc. Torch-free."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from aioengine.protocol.weight_messages import DTYPE_NAMES

_FILE_NAME: Final = "aioengine-tensors"


class TensorFile(NamedTuple):
    """A safetensors file in memory. It exists until its last descriptor is closed, also if this process is killed."""

    fd: int
    names: frozenset[str]

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        os.close(self.fd)


def dtype_name(tensor: Any) -> str:
    """Return the name of a tensor's dtype in safetensors files."""
    return DTYPE_NAMES[str(tensor.dtype).removeprefix("torch.")]


def write(tensors: Mapping[str, Any]) -> TensorFile:
    """Write torch tensors [...] to a file in memory."""
    uint8: Any = sys.modules["torch"].uint8
    header: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": dtype_name(tensor), "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    fd = os.memfd_create(_FILE_NAME)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                if tensor.numel():
                    file.write(memoryview(tensor.cpu().contiguous().reshape(-1).view(uint8).numpy()))
    except BaseException:
        os.close(fd)
        raise
    return TensorFile(fd, frozenset(tensors))


def opened(path: str, names: Iterable[str]) -> TensorFile:
    """Open a file of another process, which keeps it after the end of that process. Raises OSError."""
    return TensorFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC), frozenset(names))
