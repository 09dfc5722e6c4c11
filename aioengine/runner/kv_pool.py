"""The KV pool: the tensors with the keys and values of all pages."""

from __future__ import annotations

import math
import mmap
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.attention._base import AttentionShape, kv_pool_shape
from aioengine.kernels.clean_pages import clean_layer, clean_pages
from aioengine.kernels.kv_target import scales_of
from aioengine.runner.device_pages import DevicePages
from aioengine.settings.memory_model import INT8_SCALE_BYTES
from aioengine.settings.page_groups import PageGroups

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.runner.transfer import Upload


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
    def facts(self) -> dict[str, str | int | float | bool]:
        """The size of the pool, and the windows of groups with separate page tables, as in ``page_windows``."""
        facts: dict[str, str | int | float | bool] = {
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
        by_layer = {
            layer: kv_layer
            for layers, tensor in zip(self._groups, self.tensors, strict=True)
            for layer, kv_layer in zip(layers, tensor, strict=False)  # empty for a model without KV cache
        }
        return [by_layer[layer] for layer in sorted(by_layer)]

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
