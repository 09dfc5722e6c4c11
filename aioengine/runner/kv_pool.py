"""The KV pool: the tensors with the keys and values of all pages."""

from __future__ import annotations

import ctypes
import math
import mmap
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from aioengine.attention._base import AttentionShape, kv_pool_shape, pools_by_layer
from aioengine.kernels.clean_pages import clean_layer, clean_pages
from aioengine.kernels.kv_target import scales_of
from aioengine.protocol.messages import Fact
from aioengine.runner.transfer import Upload
from aioengine.settings.memory_model import INT8_SCALE_BYTES
from aioengine.settings.page_groups import PageGroups

_PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE


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
    """GPU memory that can be freed and allocated again at the same addresses, which CUDA graphs contain.

    The addresses are reserved once, with the driver's functions for virtual memory. Physical memory is mapped to them,
    and unmapped to free it.

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


PADDING_PAGE = 0
"""A page that no request owns. It fills unused entries of page tables, and receives the keys and values of padding rows
and tokens of CUDA graphs. Plans number the pages without it.
"""

FIRST_PAGE = 1
"""Index in the pool of page 0 of plans."""


class KVPool:
    """Keys and values of all layers, by page.

    The pool is initialized with zeros. On a CPU the memory is mapped lazily, so unused pages cost neither time nor
    memory.

    A bidirectional model has no KV cache: its pages have no memory.

    Page groups share the memory: a page contains some positions of one group, and has the size for the largest group.
    With ``has_page_groups=False``, all layers have the positions of a page, also if their windows differ.

    Attributes:
        num_pages: pages for requests; the tensors have the padding page before them.
        groups: the page groups; None: all layers share one page table.
        tensors: one for each of ``AttentionShape.groups``, in the layout of ``attention._base.kv_pool_shape``.
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        can_resume: bool = False,
        has_page_groups: bool = True,
    ) -> None:
        """can_resume: on a GPU, allocate the memory so that ``resume`` works."""
        self.num_pages = num_pages
        self.page_size = page_size
        windows = shape.page_windows if has_page_groups else ()
        self.groups = PageGroups(windows=windows, page_size=page_size) if windows else None
        self._groups = shape.groups
        self._memory: list[mmap.mmap] = []
        self._pages: list[DevicePages] = []
        self._owned: list[Tensor] = []
        for layers in self._groups[:1] if windows else self._groups:  # the first is the largest
            scale_bytes = INT8_SCALE_BYTES if dtype == torch.int8 else 0
            part, total_pages = shape.part(layers), FIRST_PAGE + num_pages
            size = kv_pool_shape(part, num_pages=total_pages, page_size=page_size, scale_bytes=scale_bytes)
            num_bytes = math.prod(size) * dtype.itemsize
            if device.type == "cpu" and num_bytes:
                self._memory.append(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
                self._owned.append(torch.frombuffer(self._memory[-1], dtype=dtype).view(size))
            elif can_resume and num_bytes:
                self._pages.append(DevicePages(num_bytes, device))
                self._owned.append(torch.as_tensor(self._pages[-1], device=device).view(dtype).view(size).zero_())
            else:
                self._owned.append(torch.zeros(size, dtype=dtype, device=device))
        # the numbers that may be NaN or inf
        self._floats = [scales_of(tensor) for tensor in self._owned] if dtype == torch.int8 else self._owned
        self.tensors = self._owned
        if windows:
            self.tensors = [self._owned[0][: len(layers)] for layers in self._groups]

    @property
    def facts(self) -> dict[str, Fact]:
        """The size of the pool, and the windows of groups with separate page tables, as in ``page_windows``."""
        facts: dict[str, Fact] = {
            "num_pages": self.num_pages,
            "page_size": self.page_size,
            "kv_pool_bytes": self.num_bytes,
        }
        if self.groups is not None:
            facts["page_windows"] = " ".join(str(window or 0) for window in self.groups.windows)
        return facts

    @property
    def num_bytes(self) -> int:
        """The size of the pool in bytes."""
        return sum(tensor.nbytes for tensor in self._owned)

    @property
    def layers(self) -> list[Tensor]:
        """Keys and values [1 or 2, N, K, S, E] of each layer of the model."""
        return pools_by_layer(self._groups, self.tensors)

    def release(self) -> None:
        """Free the memory. No step may run until ``resume``."""
        for memory in self._memory:
            memory.madvise(mmap.MADV_DONTNEED)
        for pages in self._pages:
            if pages.is_mapped:
                pages.unmap()
        if not (self._memory or self._pages):
            for tensor in self._owned:
                tensor.untyped_storage().resize_(0)

    def resume(self) -> None:
        """Allocate the memory again, at the same addresses. The pool is initialized with zeros.

        On a CPU, memory is allocated when it is written to.
        """
        for pages, tensor in zip(self._pages, self._owned, strict=False):
            if not pages.is_mapped:  # an earlier call has mapped some, and then failed for lack of memory
                pages.map()
            tensor.zero_()

    def clean(self, pages: list[int]) -> None:
        """Set non-finite numbers in these pages to zero.

        Attention multiplies unwritten slots of a page by zero, so a NaN of a failed request would reach the next owner.
        Finite numbers are unchanged, so pages of a shared prefix remain valid.
        """
        indices = torch.tensor(pages, dtype=torch.int64, device=self.tensors[0].device)
        for layer in chain.from_iterable(self._floats):  # layer by layer, to limit the size of the copy
            clean_layer(layer, indices)

    def clean_failed(self, pages: dict[int, list[int]], token_ids: Tensor, upload: Upload) -> None:
        """Queue the cleaning on the device after a step in flight, for the rows that fail in this step.

        Args:
            pages: index into ``token_ids`` -> pages of this row.
            token_ids: [S] int64 on the device, the result of the step, negative for a failed row.
        """
        counts = np.fromiter(map(len, pages.values()), np.int32, len(pages))
        rows = np.stack((np.fromiter(pages, np.int32, len(pages)), counts.cumsum(dtype=np.int32) - counts, counts), 1)
        page_ids = np.fromiter(chain.from_iterable(pages.values()), np.int32, int(counts.sum()))
        spans, pages_on_device = upload(rows), upload(page_ids)
        for tensor in self._floats:
            clean_pages(tensor, token_ids, spans, pages_on_device)
