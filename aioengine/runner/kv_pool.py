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
    """Keys and values of all layers, by page: ``tensor`` in the layout of ``attention.kv_pool_shape``.

    It starts as zeros. On a CPU these come from the operating system, page by page as they are written: a pool costs
    time and memory only as far as it is used.

    A model that attends in both directions keeps no keys and values: its pages are numbers without memory.

    Attributes:
        num_pages: pages that requests can have; the tensor has the padding page before them.
    """

    def __init__(
        self, shape: AttentionShape, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = kv_pool_shape(shape, num_pages=FIRST_PAGE + num_pages, page_size=page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_bytes = math.prod(size) * dtype.itemsize
        self._memory: mmap.mmap | None = None
        if device.type == "cpu" and self.num_bytes:
            self._memory = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.tensor = torch.frombuffer(self._memory, dtype=dtype).view(size)
        else:
            self.tensor = torch.zeros(size, dtype=dtype, device=device)

    def release(self) -> None:
        """Free the memory; nothing may be computed after this."""
        if self._memory is None:
            self.tensor.untyped_storage().resize_(0)
        else:
            self._memory.madvise(mmap.MADV_DONTNEED)

    def clean(self, pages: list[int]) -> None:
        """Set the non-finite numbers in these pages to zero.

        Attention multiplies the unwritten slots of a page by zero, so a NaN that a failed request left there would
        reach the next one. Finite numbers stay: pages of a shared prefix lose nothing.
        """
        indices = torch.tensor(pages, dtype=torch.int64, device=self.tensor.device)
        for layer in self.tensor:  # one layer at a time bounds the copy
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
        clean_pages(self.tensor, marks, upload(rows), upload(page_ids))
