"""Asynchronous copies between the host and the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_NUM_SEGMENTS = 8
_SEGMENT_BYTES = 4 << 20
_ALIGNMENT = 16

Upload = Callable[[npt.NDArray[Any]], Tensor]
"""Copies a host array [...] to the device. On a CPU the tensor shares its memory."""


class PinnedUpload:
    """Copies through pinned memory, so that the host does not wait for earlier steps of the device.

    The memory is a ring of segments. A segment is reused once its event shows that all copies from it are done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._segments = torch.empty(_NUM_SEGMENTS, _SEGMENT_BYTES, dtype=torch.uint8, pin_memory=True)
        self._views: list[npt.NDArray[np.uint8]] = [segment.numpy() for segment in self._segments]
        self._copied = [torch.cuda.Event() for _ in range(_NUM_SEGMENTS)]
        self._segment = 0
        self._used = 0

    def __call__(self, column: npt.NDArray[Any]) -> Tensor:
        """[...] on the host -> [...] on the device, without waiting."""
        column = np.ascontiguousarray(column)
        if column.nbytes > _SEGMENT_BYTES:
            return torch.from_numpy(column).pin_memory().to(self._device, non_blocking=True)
        if self._used + column.nbytes > _SEGMENT_BYTES:
            self._copied[self._segment].record()
            self._segment = (self._segment + 1) % _NUM_SEGMENTS
            self._copied[self._segment].synchronize()
            self._used = 0
        start, end = self._used, self._used + column.nbytes
        self._used = end + -end % _ALIGNMENT
        pinned = self._views[self._segment][start:end].view(column.dtype).reshape(column.shape)
        pinned[...] = column
        return torch.from_numpy(pinned).to(self._device, non_blocking=True)


def upload_to(device: torch.device) -> Upload:
    """Return the upload to this device. On a CPU it is ``from_numpy``: calling ``to`` would cost microseconds."""
    return torch.from_numpy if device.type == "cpu" else PinnedUpload(device)


def upload_together(upload: Upload, columns: dict[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
    """Copy int64 or int32 arrays [...] to the device at once, because each copy takes up to 60 us of the host."""
    if not isinstance(upload, PinnedUpload):
        return {name: upload(column) for name, column in columns.items()}
    sizes = [2 * -(-column.nbytes // _ALIGNMENT) for column in columns.values()]  # int64 numbers
    packed = np.empty(sum(sizes), dtype=np.int64)
    start = 0
    for column, size in zip(columns.values(), sizes, strict=True):
        packed[start : start + size].view(column.dtype)[: column.size] = column.ravel()
        start += size
    tensors: dict[str, Tensor] = {}
    for (name, column), part in zip(columns.items(), upload(packed).split(sizes), strict=True):
        tensor = part if column.dtype == np.int64 else part.view(torch.int32)
        tensors[name] = tensor if tensor.shape == column.shape else tensor[: column.size].view(column.shape)
    return tensors


def host_copy(values: Tensor) -> Tensor:
    """Copy [...] to the host. The result is valid once the queued work is done. On a CPU it is the same tensor."""
    if not values.is_cuda:
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


class Readback:
    """A copy of numbers to the host, queued after a step and waited for when the step is collected.

    If tokens are sampled later, there is no ``source`` until ``start`` is called.

    Attributes:
        source: [S, ...] on the device; the next step may overwrite it.
    """

    __slots__ = ("_arrived", "_values", "source")

    def __init__(self, values: Tensor | None) -> None:
        """values: [S, ...]; None: ``start`` is called later."""
        self._values: Tensor | None = None
        if values is not None:
            self.start(values)

    def start(self, values: Tensor) -> None:
        """Queue the copy of values [S, ...]."""
        self.source = values
        self._arrived: torch.cuda.Event | None = None
        self._values = host_copy(values)
        if values.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> list[int]:
        """Wait for the device and return the numbers [S]."""
        values: list[int] = self.array().tolist()
        return values

    def array(self) -> npt.NDArray[np.generic]:
        """Wait for the device and return the numbers [S, ...] as an array.

        Raises:
            RuntimeError: ``start`` was never called.
        """
        if self._values is None:
            raise RuntimeError("the tokens of this step were not sampled, because the next step failed")
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.numpy()
