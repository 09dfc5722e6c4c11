"""The page tables of open requests: which pages of the pool they have.

R rows of a step, P pages of the longest row, G groups of layers with page tables of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aioengine.runner.kv_pool import FIRST_PAGE, PADDING_PAGE

if TYPE_CHECKING:
    import numpy.typing as npt

    from aioengine.settings.page_groups import PageGroups

    Ints = npt.NDArray[np.int64]


class PageTables:
    """The page tables by row index, in memory that never moves.

    Attributes:
        tables: [G, max_rows, max_row_pages] int32 on the host, pages of the pool: the first ``counts`` of a row are its
            own, the others are the padding page.
        counts: [max_rows] int64 on the host.
        groups: of the layers; None: all have one page table, and no page is given back.
    """

    def __init__(self, *, max_rows: int, max_row_pages: int, num_pages: int, groups: PageGroups | None = None) -> None:
        """num_pages: of the pool. max_row_pages: of the longest request."""
        num_groups = 1 if groups is None else groups.num_groups
        self.tables = np.zeros((num_groups, max_rows, max_row_pages), dtype=np.int32)  # takes memory as it is used
        self.counts = np.zeros(max_rows, dtype=np.int64)
        self.groups = groups
        self._pool_pages = num_pages

    def open(self, row_index: int) -> None:
        """A new request, without pages."""
        self.counts[row_index] = 0
        self.tables[:, row_index] = PADDING_PAGE

    def pages(self, row_index: int) -> list[int]:
        """The pages that a request has or had, of all groups."""
        return self.tables[:, row_index, : self.counts[row_index]].ravel().tolist()

    def add(self, row_index: int, pages: list[int]) -> None:
        """Append to the tables of a request. ``pages`` count from 0, as in plans: they leave the padding page out,
        which stands here for one that was given back, -1 there.

        Raises:
            ValueError: more pages than the longest request can have, or a page that is not in the pool.
        """
        num_groups, _, most = self.tables.shape
        start = int(self.counts[row_index])
        end = start + len(pages) // num_groups
        if end > most:
            message = f"{end} pages, but the longest request has {most}"
            raise ValueError(message)
        least = 0 if self.groups is None else -1
        if pages and not (min(pages) >= least and max(pages) < self._pool_pages):
            message = f"pages {pages} are not all in the pool of {self._pool_pages}"
            raise ValueError(message)
        if num_groups == 1:
            self.tables[0, row_index, start:end] = [page + FIRST_PAGE for page in pages]
        else:
            of_groups = np.array(pages, dtype=np.int32).reshape(-1, num_groups).T
            self.tables[:, row_index, start:end] = of_groups + FIRST_PAGE
        self.counts[row_index] = end

    def of_step(self, row_indices: Ints, starts: Ints, num_pages: int) -> npt.NDArray[np.int32]:
        """The first ``num_pages`` P pages of R rows, [G, R, P], in a step that computes them from ``starts`` [R] on.
        What no token of it sees may be of other requests by now; the padding page takes its place.
        """
        if self.groups is None:
            return self.tables[0][row_indices, :num_pages][np.newaxis]
        tables = np.stack([table[row_indices, :num_pages] for table in self.tables])
        places = np.arange(num_pages)
        for table, window in zip(tables, self.groups.windows, strict=True):
            if window is not None:
                firsts = (starts - (window - 1)) // self.groups.page_size
                table[places < firsts[:, np.newaxis]] = PADDING_PAGE
        return tables
