"""Page groups: layers with the same window, which share page tables.

All pages have the same size, so any page can serve any group. A request needs one page of each group per ``page_size``
positions. In a group without a window it keeps all pages. In a group with a window it keeps the pages that later tokens
attend to, and frees older ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

_MAX_PADDED: Final = 1.25
"""Maximum ratio of layers in all groups, with padding, to layers of the model. Above it, all layers share one page
table, and pages are not freed.
"""


def layer_groups(windows: Sequence[int | None]) -> tuple[tuple[tuple[int, ...], ...], tuple[int | None, ...]]:
    """Return the layers of each group, largest window first, and the window of each group.

    The layers with the largest window are one group. The others are divided into groups of the same number of layers,
    because all pages have the same size. The windows are () if all groups share one page table.
    """
    sizes = sorted(set(windows), key=lambda window: (window is not None, -(window or 0)))
    by_window = [tuple(layer for layer, window in enumerate(windows) if window == size) for size in sizes]
    if not by_window or sizes == [None]:
        return tuple(by_window), ()
    length = len(by_window[0])
    groups = [layers[i : i + length] for layers in by_window for i in range(0, len(layers), length)]
    if len(groups) * length > _MAX_PADDED * len(windows):
        return tuple(by_window), ()
    return tuple(groups), tuple(windows[layers[0]] for layers in groups)


class PageGroups(Struct, frozen=True, kw_only=True):
    """The page groups of a model.

    Attributes:
        windows: the window of each group: positions that a token attends to, including its own; None: all positions.
        page_size: positions per page.
        min_tokens: tokens that one step must be able to compute: the tokens of a whole image, or else 1.
    """

    windows: tuple[int | None, ...]
    page_size: int
    min_tokens: int = 1

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def first_seen(self, group: int, position: int) -> int:
        """Return the index of the first page that the token at ``position`` attends to."""
        window = self.windows[group]
        return 0 if window is None else max(position - window + 1, 0) // self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Return the maximum number of pages, in all groups, that a request of ``num_tokens`` tokens needs at a time.

        The request is computed in steps of ``min_tokens``.
        """
        wanted = -(-num_tokens // self.page_size)
        return sum(wanted if limit is None else min(wanted, limit) for limit in map(self._max_pages, self.windows))

    def tokens_in(self, num_pages: int, context_length: int) -> int:
        """Return the tokens, in whole pages, of requests of ``context_length`` that fit into ``num_pages`` pages."""
        length = -(-context_length // self.page_size)
        num_requests, left = divmod(num_pages, self.pages_for(context_length))
        # the longest request that fits into the rest
        longest = bisect_right(range(1, length + 1), left, key=lambda pages: self.pages_for(pages * self.page_size))
        return (num_requests * length + longest) * self.page_size

    def pages_in(self, num_tokens: int, context_length: int) -> int:
        """Return the pages for ``num_tokens`` tokens of requests of ``context_length``: inverse of ``tokens_in``."""
        num_requests, left = divmod(num_tokens, -(-context_length // self.page_size) * self.page_size)
        return num_requests * self.pages_for(context_length) + self.pages_for(left)

    def _max_pages(self, window: int | None) -> int | None:
        """Return the maximum number of pages of a request in a group with this window; None without a window.

        One more position is kept because it may be computed again. Pages are freed when a page is full, so two pages
        are partly unused.
        """
        return None if window is None else (window + self.min_tokens + self.page_size - 2) // self.page_size + 2
