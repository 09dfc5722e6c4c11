"""The tensor behind the page ids."""

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
"""Nobody's page: it stands where a page table has room to fill, and takes the keys and values of the rows and tokens
that fill a CUDA graph; without graphs it stays zero. Plans do not count it.
"""

FIRST_PAGE = 1
"""Where page 0 of a plan is in the pool."""


class KVPool:
    """Keys and values of all layers, by page: ``tensor`` in the layout of ``attention.kv_pool_shape``.

    num_pages: pages that requests can have; the tensor has the padding page before them.

    It starts as zeros. On the CPU these come from the operating system, page by page as they are written: a pool costs
    time and memory only as far as it is used.
    """

    def __init__(
        self, shape: AttentionShape, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = kv_pool_shape(shape, num_pages=FIRST_PAGE + num_pages, page_size=page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_bytes = math.prod(size) * dtype.itemsize
        self._memory: mmap.mmap | None = None
        if device.type == "cpu":
            self._memory = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.tensor = torch.frombuffer(self._memory, dtype=dtype).view(size)
        else:
            self.tensor = torch.zeros(size, dtype=dtype, device=device)

    def release(self) -> None:
        """Give the memory back; nothing may be computed after this."""
        if self._memory is None:
            self.tensor.untyped_storage().resize_(0)
        else:
            self._memory.madvise(mmap.MADV_DONTNEED)

    def clean(self, pages: list[int]) -> None:
        """Make what is not a finite number in these pages zero.

        Attention multiplies the unwritten slots of a page by zero, so what a failed request left there would spread to
        the next one. Finite numbers stay as they are: pages of a shared prefix lose nothing.
        """
        indices = torch.tensor(pages, dtype=torch.int64, device=self.tensor.device)
        for layer in self.tensor:  # one layer at a time bounds the copy
            layer[:, indices] = layer[:, indices].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def clean_marked(self, pages: dict[int, list[int]], marks: Tensor, upload: Upload) -> None:
        """The same behind a step in flight, for those of the pages whose row it marks: by a negative number in
        ``marks`` [S], at the place that ``pages`` has as a key.
        """
        counts = np.fromiter(map(len, pages.values()), np.int32, len(pages))
        rows = np.stack((np.fromiter(pages, np.int32, len(pages)), counts.cumsum(dtype=np.int32) - counts, counts), 1)
        page_ids = np.fromiter(chain.from_iterable(pages.values()), np.int32, int(counts.sum()))
        clean_pages(self.tensor, marks, upload(rows), upload(page_ids))
