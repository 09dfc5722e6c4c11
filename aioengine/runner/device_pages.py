"""GPU memory that can be freed and allocated again at the same addresses, which CUDA graphs contain.

The addresses are reserved once, with the driver's functions for virtual memory. Physical memory is mapped to them, and
unmapped to free it.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch

_PINNED: Final = 1
_ON_DEVICE: Final = 1
_READ_WRITE: Final = 3


class _Location(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class DevicePages:
    """A range of addresses on a GPU, mapped to memory.

    Attributes:
        is_mapped: whether it has memory.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises RuntimeError if the memory is short."""
        torch.cuda.init()
        torch.empty(1, device=device)  # the context of torch is now current in this thread
        self._num_bytes = num_bytes
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        index = torch.cuda.current_device() if device.index is None else device.index
        location = _Location(_ON_DEVICE, index)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        unit = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self._properties), 0)
        self._size = ctypes.c_size_t(-(-num_bytes // unit.value) * unit.value)
        self._address = ctypes.c_uint64()
        zero = ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(self._address), self._size, *zero)
        self.is_mapped = False
        self.map()

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """The bytes, for ``torch.as_tensor``."""
        data = self._address.value, False
        return {"shape": (self._num_bytes,), "typestr": "|u1", "data": data, "version": 3}

    def map(self) -> None:
        """Allocate memory. Its content is undefined. Raises RuntimeError if the memory is short."""
        handle, zero = ctypes.c_uint64(), ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(handle), self._size, ctypes.byref(self._properties), zero)
        self._call("cuMemMap", self._address, self._size, ctypes.c_size_t(0), handle, zero)
        self._call("cuMemRelease", handle)  # the memory is freed when it is unmapped
        self._call("cuMemSetAccess", self._address, self._size, ctypes.byref(self._access), ctypes.c_size_t(1))
        self.is_mapped = True

    def unmap(self) -> None:
        """Free the memory, after all queued work."""
        torch.cuda.synchronize()
        self._call("cuMemUnmap", self._address, self._size)
        self.is_mapped = False

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._driver, name)(*arguments):
            raise RuntimeError(f"{name} failed with error {code} of the CUDA driver, for {self._num_bytes:,} bytes")
