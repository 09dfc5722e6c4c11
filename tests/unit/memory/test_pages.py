"""The page allocator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.memory.prefix_cache import PageAllocator


def test_pages_are_allocated_in_order_and_freed_pages_first() -> None:
    pages = PageAllocator(5)
    assert pages.allocate(3) == [0, 1, 2]
    pages.free([1])
    assert pages.allocate(2) == [1, 3]
    assert pages.num_free == 1


def test_allocating_more_pages_than_are_free_allocates_none() -> None:
    pages = PageAllocator(2)
    with pytest.raises(ValueError, match="3 pages are needed, but only 2 are free"):
        pages.allocate(3)
    assert pages.num_free == 2


def test_allocating_no_page_returns_an_empty_list() -> None:
    pages = PageAllocator(2)
    assert pages.allocate(0) == []
    assert pages.num_free == 2


def test_freeing_a_page_twice_is_an_error() -> None:
    pages = PageAllocator(2)
    with pytest.raises(ValueError, match="freed twice"):
        pages.free([0])


@given(st.lists(st.integers(-3, 5), max_size=40))
def test_no_page_is_allocated_twice_or_lost(changes: list[int]) -> None:
    pages = PageAllocator(8)
    taken: list[int] = []
    for change in changes:
        if 0 <= change <= pages.num_free:
            taken += pages.allocate(change)
        elif change < 0:
            given_back, taken = taken[change:], taken[:change]
            pages.free(given_back)
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(range(8))
        assert pages.num_free + len(taken) == 8
