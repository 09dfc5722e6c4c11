"""PageGroups: how many pages a request has where layers attend to a window alone.

Layers are in groups, each with pages of its own for the same positions: one page of every group for every page of
positions. All pages have the same size in memory, so that any page serves any group. A request keeps all pages of a
group without a window. Of one with a window it keeps those with positions that its next tokens can see, and what is
behind them is given back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_PADDED: Final = 1.25
"""Layers that pages have place for, by those that there are: where groups would waste more, all layers have one page
table, and no page is given back.
"""


def layer_groups(windows: Sequence[int | None]) -> tuple[tuple[tuple[int, ...], ...], tuple[int | None, ...]]:
    """The groups of layers with these windows, those that attend furthest first, and the window of each group; empty
    where pages are not given back: then all groups have the same page table.

    All layers of a group have the same window. Pages of groups have the same size, so those of the furthest window are
    one group, and the others are divided into groups of as many layers.
    """
    reaches = sorted(set(windows), key=lambda window: (window is not None, -(window or 0)))
    found = [tuple(layer for layer, window in enumerate(windows) if window == reach) for reach in reaches]
    if not found or reaches == [None]:
        return tuple(found), ()
    size = len(found[0])
    divided = [layers[i : i + size] for layers in found for i in range(0, len(layers), size)]
    if len(divided) * size > _MAX_PADDED * len(windows):
        return tuple(found), ()
    return tuple(divided), tuple(windows[layers[0]] for layers in divided)


class PageGroups(Struct, frozen=True, kw_only=True):
    """The groups of a model, and the arithmetic of their pages.

    Attributes:
        windows: of each group, the number of positions that a token attends to, itself and those before it; None: all.
        page_size: positions of a page.
        min_tokens: tokens that are computed in one step at the least: those of an image that is not divided, else 1.
    """

    windows: tuple[int | None, ...]
    page_size: int
    min_tokens: int = 1

    def __post_init__(self) -> None:
        if not self.windows or any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"there must be windows, each None or at least 1, not {self.windows}")

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def first_seen(self, group: int, position: int) -> int:
        """The first page of positions of which the token at ``position`` sees anything."""
        window = self.windows[group]
        return 0 if window is None else max(position - window + 1, 0) // self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that a request of ``num_tokens`` tokens can need at a time, in all groups: with these it gets to its
        end, in steps of ``min_tokens``.
        """
        wanted = -(-num_tokens // self.page_size)
        return sum(wanted if most is None else min(wanted, most) for most in map(self._most, self.windows))

    def tokens_in(self, num_pages: int, context_length: int) -> int:
        """How many tokens have place in ``num_pages`` pages, in whole pages, if requests have ``context_length``."""
        of_context = self.pages_for(context_length)
        num_whole, left = divmod(num_pages, of_context)
        low, high = 0, -(-context_length // self.page_size)
        while low < high:  # the longest request for which the rest suffices
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.pages_for(middle * self.page_size) <= left else (low, middle - 1)
        return num_whole * -(-context_length // self.page_size) * self.page_size + low * self.page_size

    def pages_in(self, num_tokens: int, context_length: int) -> int:
        """The pages for ``num_tokens`` tokens of requests of ``context_length``: the inverse of ``tokens_in``."""
        whole = -(-context_length // self.page_size) * self.page_size
        num_whole, left = divmod(num_tokens, whole)
        return num_whole * self.pages_for(context_length) + self.pages_for(left)

    def _most(self, window: int | None) -> int | None:
        """Pages of a group with this window. One position more is kept, which may be computed a second time, and
        pages are given back once a page is full; so there are two that are not used to the full.
        """
        return None if window is None else (window + self.min_tokens + self.page_size - 2) // self.page_size + 2
