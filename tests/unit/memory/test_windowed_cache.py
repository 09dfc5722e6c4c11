"""Invariants of the windowed cache under random events."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aioengine.memory.windowed_cache import RELEASED, WindowedAllocation, WindowedCache
from aioengine.settings.page_groups import PageGroups
from tests.kit.integrity import check_cache

WINDOWS = st.sampled_from([(1,), (4,), (None, 3), (None, 5, 2), (6, 6)])


@dataclass
class Running:
    """A request: its tokens, the number of computed tokens, and its pages."""

    token_ids: list[int]
    num_computed: int
    allocation: WindowedAllocation


class Machine(RuleBasedStateMachine):
    """Requests start, grow, compute and end; sessions pin pages; pages are evicted."""

    @initialize(windows=WINDOWS, page_size=st.sampled_from([1, 2, 3]), enabled=st.sampled_from([True, True, False]))
    def begin(self, windows: tuple[int | None, ...], page_size: int, enabled: bool) -> None:
        self.groups = PageGroups(windows=windows, page_size=page_size)
        self.cache = WindowedCache(self.groups, num_pages=30, enabled=enabled)
        self.running: list[Running] = []
        self.written: dict[int, tuple[int, tuple[int, ...]]] = {}
        """By page: its group, and all tokens up to its end."""

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for request in self.running:
            self.cache.release(request.allocation)
        assert self.cache.clear()
        assert self.cache.num_allocatable == 30
        assert not self.cache._tree.root.children, "no node is left without pages"

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=14), salt=st.sampled_from(["", "", "a"]))
    def come(self, token_ids: list[int], salt: str) -> None:
        match = self.cache.match(token_ids, salt)
        if match.pending is not None:
            return
        allocation = self.cache.allocate(token_ids, match)
        self.running.append(Running(token_ids.copy(), len(match.path) * self.groups.page_size, allocation))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        end = request.num_computed + data.draw(st.integers(1, 4))
        request.token_ids += [1] * (end - len(request.token_ids))
        while request.allocation.capacity < end:
            could = self.cache.num_allocatable >= self.groups.num_groups
            assert (self.cache.grow(request.allocation) is not None) == could
            if not could:
                return
        size, num_groups = self.groups.page_size, self.groups.num_groups
        for index in range(request.num_computed // size, -(-end // size)):
            for group in range(num_groups):
                page = request.allocation.pages[index * num_groups + group]
                upto = tuple(request.token_ids[: min(end, (index + 1) * size)])
                self.written[page] = group, (hash(request.allocation.salt), *upto)
        request.num_computed = end
        if end >= request.allocation.next_insert_at:
            self.cache.insert(request.allocation, request.token_ids, end)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), session=st.integers(0, 2), is_invalid=st.booleans())
    def go(self, data: st.DataObject, session: int, is_invalid: bool) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        if session and not is_invalid:
            self.cache.pin(session, request.allocation)
        self.cache.release(request.allocation, is_invalid=is_invalid)
        self.cache.release(request.allocation)

    @rule(session=st.integers(1, 2))
    def close_session(self, session: int) -> None:
        self.cache.unpin(session)

    @rule(count=st.integers(1, 10))
    def evict(self, count: int) -> None:
        self.cache.evict(count)

    @invariant()
    def pages_add_up_and_all_that_is_seen_is_there(self) -> None:
        if not hasattr(self, "cache"):
            return
        check_cache(self.cache, (request.allocation for request in self.running))
        owned: list[int] = []
        for request in self.running:
            owned += self._own_pages(request.allocation)
            self._check_seen(request)
        assert len(owned) == len(set(owned)), "no page belongs to two requests"

    def _own_pages(self, allocation: WindowedAllocation) -> list[int]:
        pages = zip(allocation.pages, allocation.nodes, strict=True)
        return [page for page, node in pages if node is None and page != RELEASED]

    def _check_seen(self, request: Running) -> None:
        """Check that all pages in the window of the next token are present."""
        size, num_groups = self.groups.page_size, self.groups.num_groups
        for group, window in enumerate(self.groups.windows):
            first = 0 if window is None else max(0, request.num_computed - window + 1)
            for index in range(first // size, -(-request.num_computed // size)):
                found_group, tokens = self.written[request.allocation.pages[index * num_groups + group]]
                assert found_group == group
                known = (
                    hash(request.allocation.salt),
                    *request.token_ids[: min(request.num_computed, (index + 1) * size)],
                )
                assert tokens == known


TestWindowedCache = Machine.TestCase


def test_prefix_is_pending_until_another_request_has_computed_it() -> None:
    cache = WindowedCache(PageGroups(windows=(None, 3), page_size=2), num_pages=20)
    token_ids = list(range(9))
    allocation = cache.allocate(token_ids, cache.match(token_ids))
    assert cache.match(token_ids).pending is allocation.path[-1]


def test_disabled_cache_keeps_no_pages() -> None:
    cache = WindowedCache(PageGroups(windows=(None, 3), page_size=2), num_pages=20, enabled=False)
    token_ids = list(range(8))
    allocation = cache.allocate(token_ids, cache.match(token_ids))
    for end in range(2, 9, 2):
        cache.grow(allocation)
        cache.insert(allocation, token_ids, end)
    assert (cache.num_cached, allocation.path) == (0, [])


class CountedDict(dict[object, object]):
    """Counts its lookups."""

    num_looks = 0

    def __contains__(self, key: object) -> bool:
        CountedDict.num_looks += 1
        return super().__contains__(key)


def test_long_prefix_without_its_windows_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_pages, groups = 300, PageGroups(windows=(None, 40, 40), page_size=4)
    cache = WindowedCache(groups, num_pages=3 * num_pages)
    token_ids = list(range(4 * num_pages))
    allocation = cache.allocate(token_ids, cache.match(token_ids))
    for end in range(4, 4 * num_pages + 1, 4):
        assert cache.grow(allocation) is not None
        cache.insert(allocation, token_ids, end)
    path = allocation.path.copy()
    cache.release(allocation)
    assert len(cache.match([*token_ids, 1]).path) == num_pages
    cache.evict(2 * num_pages + 10)  # pages of the windows, and the last page of the others
    for node in path:
        node.children = CountedDict(node.children)  # type: ignore[assignment]
    monkeypatch.setattr(CountedDict, "num_looks", 0)
    assert not cache.match([*token_ids, 1]).path
    assert CountedDict.num_looks < 4 * num_pages
