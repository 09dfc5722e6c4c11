"""The page tables of open requests.

R rows of a step, P pages of the longest row, G page groups.
"""

from __future__ import annotations

import numpy as np

from aioengine.kernels.arrays import Ints32, Ints64
from aioengine.runner.kv_pool import FIRST_PAGE, PADDING_PAGE
from aioengine.settings.page_groups import PageGroups


class PageTables:
    """The page tables by row index, in memory with fixed addresses.

    Attributes:
        tables: [G, max_rows, max_row_pages] int32 on the host, page ids in the pool. The first ``counts`` pages of a
            row are its own; the rest is the padding page.
        counts: [max_rows] int64 on the host.
        groups: the page groups; None: all layers share one page table, and no pages are freed early.
    """

    def __init__(self, *, max_rows: int, max_row_pages: int, groups: PageGroups | None = None) -> None:
        """max_row_pages: pages of the longest request."""
        num_groups = 1 if groups is None else groups.num_groups
        shape = num_groups, max_rows, max_row_pages
        self.tables = np.zeros(shape, dtype=np.int32)  # only written parts use memory
        self.counts = np.zeros(max_rows, dtype=np.int64)
        self.groups = groups

    def open(self, row_index: int) -> None:
        """Start a new request without pages."""
        self.tables[:, row_index, : self.counts[row_index]] = PADDING_PAGE
        self.counts[row_index] = 0

    def pages(self, row_index: int) -> list[int]:
        """Return the pages that a request has or had, in all groups."""
        return self.tables[:, row_index, : self.counts[row_index]].ravel().tolist()

    def add(self, row_index: int, pages: list[int]) -> None:
        """Append pages to the tables of a request.

        pages: numbered from 0 without the padding page, as in plans. -1: a page that was freed; it becomes the padding
        page.
        """
        num_groups = len(self.tables)
        start = int(self.counts[row_index])
        end = start + len(pages) // num_groups
        if num_groups == 1:
            self.tables[0, row_index, start:end] = [page + FIRST_PAGE for page in pages]
        else:
            pages_by_group = np.array(pages, dtype=np.int32).reshape(-1, num_groups).T
            self.tables[:, row_index, start:end] = pages_by_group + FIRST_PAGE
        self.counts[row_index] = end

    def of_step(self, row_indices: Ints64, starts: Ints64, num_pages: int) -> Ints32:
        """Return the first ``num_pages`` pages [G, R, P] of the rows, which compute tokens from positions ``starts``
        [R] on. Pages before the window may belong to other requests by now, so they are replaced by the padding page.
        """
        if self.groups is None:
            return self.tables[0][row_indices, :num_pages][np.newaxis]
        tables = np.stack([table[row_indices, :num_pages] for table in self.tables])
        page_indices = np.arange(num_pages)
        for table, window in zip(tables, self.groups.windows, strict=True):
            if window is not None:
                firsts = (starts - (window - 1)) // self.groups.page_size
                table[page_indices < firsts[:, np.newaxis]] = PADDING_PAGE
        return tables
