"""The KV pool: the tensor that holds keys and values of all pages."""

from __future__ import annotations

import math
import mmap
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from aioengine.attention._base import kv_pool_shape
from aioengine.kernels.clean_pages import clean_pages
from aioengine.settings.page_groups import PageGroups

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.attention._base import AttentionShape
    from aioengine.runner.transfer import Upload


PADDING_PAGE = 0
"""A page that no request owns: it fills the unused entries of page tables, and takes the keys and values of the rows
and tokens that pad a CUDA graph; without graphs it stays zero. Plans number the pages without it.
"""

FIRST_PAGE = 1
"""Index in the pool of the page that plans call page 0."""


class KVPool:
    """Keys and values of all layers, by page.

    It starts as zeros. On a CPU these come from the operating system, page by page as they are written: a pool costs
    time and memory only as far as it is used.

    A model that attends in both directions keeps no keys and values: its pages are numbers without memory.

    Where groups of layers have pages of their own, all have the same memory: a page is what a group has of some
    positions, and of the largest group.

    Attributes:
        num_pages: pages that requests can have; the tensors have the padding page before them.
        groups: of layers with pages of their own; None: all layers have the same page table.
        tensors: one for each of ``AttentionShape.groups``, in the layout of ``attention._base.kv_pool_shape``.
    """

    def __init__(
        self, shape: AttentionShape, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        windows = shape.page_windows
        self.groups = PageGroups(windows=windows, page_size=page_size) if windows else None
        self._groups = shape.groups
        self._memory: list[mmap.mmap] = []
        self._owned: list[Tensor] = []
        for layers in self._groups[:1] if windows else self._groups:  # the first is the largest
            size = kv_pool_shape(shape.part(layers), num_pages=FIRST_PAGE + num_pages, page_size=page_size)
            num_bytes = math.prod(size) * dtype.itemsize
            if device.type == "cpu" and num_bytes:
                self._memory.append(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
                self._owned.append(torch.frombuffer(self._memory[-1], dtype=dtype).view(size))
            else:
                self._owned.append(torch.zeros(size, dtype=dtype, device=device))
        self.tensors = self._owned
        if windows:
            self.tensors = [self._owned[0][: len(layers)] for layers in self._groups]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._owned)

    @property
    def facts(self) -> dict[str, str | int | float | bool]:
        """Its size, and the windows of groups with pages of their own, as ``page_windows`` reads them."""
        found: dict[str, str | int | float | bool] = {
            "num_pages": self.num_pages,
            "page_size": self.page_size,
            "kv_pool_bytes": self.num_bytes,
        }
        if self.groups is not None:
            found["page_windows"] = " ".join(str(window or 0) for window in self.groups.windows)
        return found

    @property
    def layers(self) -> list[Tensor]:
        """Keys and values [1 or 2, N, K, S, E] of each layer of the model."""
        found = {
            layer: each
            for layers, tensor in zip(self._groups, self.tensors, strict=True)
            for layer, each in zip(layers, tensor, strict=False)  # a model that keeps no K and V has none
        }
        return [found[layer] for layer in sorted(found)]

    def release(self) -> None:
        """Free the memory; nothing may be computed after this."""
        for memory in self._memory:
            memory.madvise(mmap.MADV_DONTNEED)
        if not self._memory:
            for tensor in self._owned:
                tensor.untyped_storage().resize_(0)

    def clean(self, pages: list[int]) -> None:
        """Set the non-finite numbers in these pages to zero.

        Attention multiplies the unwritten slots of a page by zero, so a NaN that a failed request left there would
        reach the next one. Finite numbers stay: pages of a shared prefix lose nothing.
        """
        indices = torch.tensor(pages, dtype=torch.int64, device=self.tensors[0].device)
        for layer in chain.from_iterable(self._owned):  # one layer at a time bounds the copy
            layer[:, indices] = layer[:, indices].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def clean_marked(self, pages: dict[int, list[int]], marks: Tensor, upload: Upload) -> None:
        """Queue this cleaning on the device, behind a step in flight, for the rows that the step marks as failed.

        Args:
            pages: index into ``marks`` -> pages of that row.
            marks: [S] int64 on the device, negative for a failed row.
        """
        counts = np.fromiter(map(len, pages.values()), np.int32, len(pages))
        rows = np.stack((np.fromiter(pages, np.int32, len(pages)), counts.cumsum(dtype=np.int32) - counts, counts), 1)
        page_ids = np.fromiter(chain.from_iterable(pages.values()), np.int32, int(counts.sum()))
        spans, pages_on_device = upload(rows), upload(page_ids)
        for tensor in self._owned:
            clean_pages(tensor, marks, spans, pages_on_device)
