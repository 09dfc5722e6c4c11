"""Scenarios of the prefix cache, and a comparison with a naive model."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aioengine.memory.prefix_cache import NEVER, Allocation, Match, PrefixCache
from aioengine.memory.radix import Salt
from tests.kit.integrity import check_cache, num_owned

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
SESSIONS = st.integers(1, 3)
SALTS = st.sampled_from(["", "", "a"])
Prefix = tuple[int | Salt, ...]


def open_(cache: PrefixCache, token_ids: list[int]) -> Allocation:
    return cache.allocate(token_ids, cache.match(token_ids))


def computed(cache: PrefixCache, token_ids: list[int]) -> Allocation:
    allocation = open_(cache, token_ids)
    cache.insert(allocation, token_ids, len(token_ids))
    return allocation


def num_matched(cache: PrefixCache, token_ids: list[int]) -> int:
    return len(cache.match(token_ids).path) * cache.page_size


def test_a_match_leaves_at_least_the_last_token_to_compute() -> None:
    cache = PrefixCache(num_pages=8, page_size=2)
    cache.release(computed(cache, [1, 2, 3, 4, 5]))
    assert num_matched(cache, [1, 2, 3, 4, 5]) == 4
    assert num_matched(cache, [1, 2, 3, 4]) == 2
    assert num_matched(cache, [1, 2, 3]) == 2
    assert num_matched(cache, [1, 2]) == 0
    assert num_matched(cache, [1]) == 0
    assert num_matched(cache, [9, 2, 3, 4, 5]) == 0


def test_pages_of_a_running_request_can_be_matched_once_they_are_full() -> None:
    cache = PrefixCache(num_pages=8, page_size=2)
    prompt = [1, 2, 3, 4, 5, 6]
    allocation = open_(cache, prompt)
    for done, num_matched in [(1, 0), (2, 1), (3, 1), (5, 2)]:
        cache.insert(allocation, prompt, done)
        match = cache.match([*prompt, 7])
        assert len(match.path) == num_matched
        assert match.pending is not None
        assert allocation.next_insert_at == 2 * (num_matched + 1)
    cache.insert(allocation, prompt, 6)
    assert len(cache.match([*prompt, 7]).path) == 3
    assert cache.match([*prompt, 7]).pending is None


def test_pending_pages_are_removed_with_their_request() -> None:
    cache = PrefixCache(num_pages=8, page_size=2)
    allocation = open_(cache, [1, 2, 3, 4, 5])
    cache.insert(allocation, [1, 2, 3, 4, 5], 2)
    pending = cache.match([1, 2, 3, 4, 5]).pending
    assert pending is not None
    cache.release(allocation)
    assert not pending.is_pending
    assert cache.match([1, 2, 3, 4, 5]).pending is None
    assert num_matched(cache, [1, 2, 3, 4, 5]) == 2
    assert cache.num_allocatable == 8
    assert cache.num_cached == 1


def test_match_continues_at_the_pending_page() -> None:
    cache = PrefixCache(num_pages=12, page_size=2)
    prompt, longer = [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]
    allocation = open_(cache, prompt)
    known = cache.match(prompt).pending
    assert known is not None
    assert cache.match(longer, known=known) == cache.match(longer) == Match([], known)
    cache.insert(allocation, prompt, 5)
    assert cache.match(longer, known=known) == cache.match(longer)
    cache.release(computed(cache, longer))
    assert len(cache.match(longer, known=known).path) == 3
    assert cache.match(prompt[:4], known=known) == cache.match(prompt[:4])
    assert cache.match(prompt[:1], known=known).path == []
    cache.release(allocation)
    cache.clear()
    assert cache.match(longer, known=known) == Match([], None)
    cache.release(computed(cache, longer))
    assert cache.match(longer, known=known) == cache.match(longer)


def test_a_page_computed_twice_is_cached_once_and_leaks_nothing() -> None:
    cache = PrefixCache(num_pages=8, page_size=2)
    first, second = open_(cache, [1]), open_(cache, [1])
    cache.insert(first, [1, 2, 3, 4], 4 if cache.grow(first) is not None else 0)
    cache.grow(second)
    cache.insert(second, [1, 2, 3, 4], 4)
    assert cache.num_cached == 2
    assert num_owned(second) == 2
    cache.grow(second)
    cache.insert(second, [1, 2, 3, 4, 5, 6], 6)
    assert num_matched(cache, [1, 2, 3, 4, 5, 6, 7]) == 6
    check_cache(cache, [first, second])
    cache.release(first)
    check_cache(cache, [second])
    cache.release(second)
    check_cache(cache, [])
    assert cache.num_allocatable == 8
    assert cache.num_cached == 3


def test_a_page_that_another_request_computed_is_shared_when_it_is_ready() -> None:
    cache = PrefixCache(num_pages=8, page_size=2)
    allocation = open_(cache, [1])
    other = open_(cache, [1, 2, 3])
    cache.insert(allocation, [1, 2], 2)
    assert allocation.num_ready == 0
    cache.insert(other, [1, 2, 3], 3)
    cache.insert(allocation, [1, 2], 2)
    assert allocation.num_ready == 1
    cache.release(allocation)
    cache.release(other)
    check_cache(cache, [])
    assert cache.num_allocatable == 8


def test_matched_pages_without_a_lock_are_no_longer_allocatable() -> None:
    cache = PrefixCache(num_pages=4, page_size=2)
    cache.release(computed(cache, [1, 2, 3, 4]))
    running = open_(cache, [9, 9, 9])
    wanted = [1, 2, 5, 6, 7, 8]
    match = cache.match(wanted)
    assert cache.num_left(match, len(wanted), 0) == -1
    assert num_matched(cache, wanted) == 2
    assert cache.num_allocatable == 2
    check_cache(cache, [running])


def test_growing_evicts_unlocked_pages_and_then_returns_none() -> None:
    cache = PrefixCache(num_pages=3, page_size=1)
    cache.release(computed(cache, [1, 2]))
    allocation = open_(cache, [5])
    assert cache.grow(allocation) is not None
    assert num_matched(cache, [1, 2, 3]) == 1
    assert cache.grow(allocation) is not None
    assert cache.grow(allocation) is None
    assert allocation.capacity == 3
    check_cache(cache, [allocation])


def test_a_match_is_never_evicted_for_its_own_request() -> None:
    cache = PrefixCache(num_pages=4, page_size=1)
    cache.release(computed(cache, [1, 2, 3]))
    allocation = open_(cache, [1, 2, 3, 4])
    assert allocation.num_ready == 3
    assert len(set(allocation.pages)) == 4


def test_a_disabled_cache_shares_nothing() -> None:
    cache = PrefixCache(num_pages=4, page_size=2, enabled=False)
    allocation = open_(cache, [1, 2, 3])
    assert allocation.next_insert_at == NEVER
    assert cache.match([1, 2, 3]) == Match([], None)
    cache.release(allocation)
    assert cache.num_allocatable == 4
    assert cache.num_cached == 0


def test_requests_with_different_salts_share_nothing() -> None:
    cache = PrefixCache(num_pages=16, page_size=2)
    prompt = [1, 2, 3, 4, 5]
    for salt in ("", "a", "b"):
        match = cache.match(prompt, salt)
        assert match.path == []
        allocation = cache.allocate(prompt, match)
        assert cache.match(prompt, salt).pending is not None
        cache.insert(allocation, [*prompt, 6], 6)  # the third page is complete now
        cache.release(allocation)
        assert len(cache.match([*prompt, 6, 7], salt).path) == 3
    assert cache.num_cached == 9
    assert cache.match([1], "a").path == cache.match([], "a").path == []
    assert cache.match(prompt, "c").path == []
    check_cache(cache, [])


def answered(cache: PrefixCache, session: int, token_ids: list[int]) -> None:
    """Compute and end a request of a session."""
    allocation = computed(cache, token_ids)
    cache.pin(session, allocation)
    cache.release(allocation)


def test_pinned_pages_of_the_least_recently_used_session_are_evicted_first() -> None:
    cache = PrefixCache(num_pages=8, page_size=1)
    answered(cache, 1, [1, 10])
    answered(cache, 2, [2, 20])
    cache.touch(1)
    cache.release(computed(cache, [3, 30]))
    assert (cache.num_allocatable, cache.num_cached, cache.num_pinned) == (8, 6, 4)
    assert cache.evict(2) == 2
    assert [num_matched(cache, [number, number * 10, 0]) for number in (1, 2, 3)] == [2, 2, 0]
    assert cache.evict(1) == 1
    assert [num_matched(cache, [number, number * 10, 0]) for number in (1, 2)] == [2, 1]
    assert cache.num_pinned == 2
    assert cache.clear()
    assert (cache.num_allocatable, cache.num_cached, cache.num_pinned) == (8, 0, 0)


def test_a_request_gets_the_pinned_pages_that_it_needs() -> None:
    cache = PrefixCache(num_pages=4, page_size=1)
    answered(cache, 1, [1, 2, 3, 4])
    allocation = open_(cache, [5, 6, 7])
    assert cache.num_allocatable == 1
    assert cache.grow(allocation) is not None
    assert cache.grow(allocation) is None
    check_cache(cache, [allocation])


def test_turns_and_branches_of_a_session_share_their_pins() -> None:
    cache = PrefixCache(num_pages=16, page_size=1)
    answered(cache, 1, [1, 2])
    answered(cache, 1, [1, 2, 3])
    answered(cache, 1, [1, 2, 4])
    answered(cache, 2, [1, 2])
    assert cache.num_pinned == 4
    cache.unpin(1)
    assert cache.num_pinned == 2
    assert cache.evict(16) == 4
    cache.unpin(2)
    cache.unpin(3)
    assert (cache.num_allocatable, cache.num_pinned) == (16, 0)


def test_invalid_pages_that_a_session_pinned_stay() -> None:
    cache = PrefixCache(num_pages=8, page_size=2)
    first, second = open_(cache, [1]), open_(cache, [1])
    cache.insert(first, [1, 2], 2)
    cache.insert(second, [1, 2], 2)
    cache.pin(1, second)
    cache.release(second)
    cache.release(first, is_invalid=True)
    assert num_matched(cache, [1, 2, 3]) == 2
    cache.unpin(1)
    assert cache.clear()


def test_invalid_pages_are_removed_unless_others_use_them() -> None:
    cache = PrefixCache(num_pages=8, page_size=2)
    cache.release(computed(cache, [1, 2, 3]))
    invalid = computed(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    other = open_(cache, [1, 2, 3, 4, 9])
    cache.release(invalid, is_invalid=True)
    check_cache(cache, [other])
    assert num_matched(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4
    cache.release(other)
    check_cache(cache, [])
    assert cache.num_allocatable == 8
    assert cache.num_cached == 2


def test_invalid_pages_with_valid_pages_below_them_stay() -> None:
    cache = PrefixCache(num_pages=8, page_size=2)
    invalid = open_(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    cache.insert(invalid, [1, 2, 3, 4, 5, 6, 7, 8], 6)
    cache.release(computed(cache, [1, 2, 9, 9]))
    cache.release(invalid, is_invalid=True)
    check_cache(cache, [])
    assert num_matched(cache, [1, 2, 3, 4, 5]) == 2
    assert cache.num_allocatable == 8
    assert cache.evict(8) == 2


def test_removing_invalid_pages_keeps_the_equal_page_of_another_request() -> None:
    """Both requests computed the same page. The node in the tree belongs to the first."""
    cache = PrefixCache(num_pages=8, page_size=2)
    first, second = open_(cache, [1]), open_(cache, [1])
    cache.insert(first, [1, 2], 2)
    cache.insert(second, [1, 2], 2)
    cache.release(first)
    cache.release(second, is_invalid=True)
    check_cache(cache, [])
    assert num_matched(cache, [1, 2, 3]) == 2


def test_the_integrity_check_finds_a_lost_page() -> None:
    cache = PrefixCache(num_pages=4, page_size=2)
    allocation = open_(cache, [1, 2, 3])
    with pytest.raises(AssertionError):
        check_cache(cache, [])
    check_cache(cache, [allocation])


def test_pages_of_a_new_request_are_pending_after_the_launch_or_at_the_next_match() -> None:
    cache = PrefixCache(num_pages=8, page_size=2)
    open_(cache, [1, 2, 3])
    assert cache.num_cached == 0
    cache.after_launch()
    assert cache.num_cached == 1
    open_(cache, [4, 5, 6])
    assert cache.match([4, 5, 7]).pending is not None


def test_some_pages_are_free_after_a_launch() -> None:
    cache = PrefixCache(num_pages=128, page_size=2)
    cache.release(computed(cache, list(range(256))))
    assert cache.num_cached == 128
    cache.after_launch()
    assert cache.num_cached == 126
    allocation = computed(cache, list(range(1000, 1256)))
    cache.after_launch()  # every page is locked
    check_cache(cache, [allocation])


def test_several_long_prompts_are_cached_together() -> None:
    """100,000 tokens on 6,250 pages, five times."""
    cache = PrefixCache(num_pages=32_000, page_size=16)
    for number in range(5):
        prompt = [number, *range(99_999)]
        cache.release(computed(cache, prompt))
        assert num_matched(cache, prompt) == 99_984
    assert cache.num_cached == 5 * 6250
    assert cache.evict(32_000) == 5 * 6250


# ------------------------------------------------------------ the naive model


@dataclass
class Sharer:
    """A request of the model: its tokens, the number of computed tokens, and its pages."""

    token_ids: list[int]
    allocation: Allocation
    num_computed: int = 0

    def prefix(self, num_tokens: int) -> Prefix:
        return (self.allocation.salt, *self.token_ids[:num_tokens])


@dataclass
class Known:
    """A cached prefix of the naive model: its users, and the time of its last unlock or unpin."""

    num_locks: int = 0
    given_up: int = 0
    num_pins: int = 0


@dataclass
class Naive:
    """The cache as a flat table of prefixes that is searched linearly."""

    known: dict[Prefix, Known] = field(default_factory=dict[Prefix, Known])
    time: int = 0
    pins: dict[int, list[Prefix]] = field(default_factory=dict[int, list[Prefix]])  # least recently used session first

    def touch(self, session: int) -> None:
        if session in self.pins:
            self.pins[session] = self.pins.pop(session)

    def unpin(self, session: int) -> None:
        for prefix in reversed(self.pins.pop(session, [])):
            self.time += 1
            self.known[prefix].num_pins -= 1
            self.known[prefix].given_up = self.time

    def leaf_to_evict(self) -> Prefix | None:
        while not (
            free := [prefix for prefix, entry in self.known.items() if not entry.num_locks and not entry.num_pins]
        ):
            if not self.pins:
                return None
            self.unpin(next(iter(self.pins)))
        leaves = [
            prefix
            for prefix in free
            if not any(len(other) > len(prefix) and other[: len(prefix)] == prefix for other in free)
        ]
        return min(leaves, key=lambda prefix: (self.known[prefix].given_up, -len(prefix)), default=None)


class CacheMachine(RuleBasedStateMachine):
    """Requests start, are computed in parts, decode and end. The content of each page is tracked."""

    @initialize(num_pages=st.integers(4, 16), page_size=st.integers(1, 3))
    def start(self, num_pages: int, page_size: int) -> None:
        self.cache = PrefixCache(num_pages=num_pages, page_size=page_size)
        self.page_size = page_size
        self.sharers: list[Sharer] = []
        self.content: dict[int, Prefix] = {}  # page -> its salt, and all tokens up to its end
        self.naive = Naive()

    def expected(self, token_ids: list[int], salt: str) -> int:
        """Return the pages of the longest known prefix, by a search through all prefixes."""
        most = (len(token_ids) - 1) // self.page_size
        count = 0
        while count < most and (salt, *token_ids[: (count + 1) * self.page_size]) in self.naive.known:
            count += 1
        return count

    @rule(token_ids=TOKENS, salt=SALTS)
    def arrive(self, token_ids: list[int], salt: str) -> None:
        match = self.cache.match(token_ids, salt)
        assert len(match.path) == self.expected(token_ids, salt)
        for index, node in enumerate(match.path):
            assert self.content[node.page] == (salt, *token_ids[: (index + 1) * self.page_size])
        missing = self.cache.pages_for(len(token_ids)) - len(match.path)
        if self.cache.num_left(match, len(token_ids), 0) < 0:
            return
        for index in range(len(match.path)):
            self.naive.known[(salt, *token_ids[: (index + 1) * self.page_size])].num_locks += 1
        self.evict_in_model(missing)
        sharer = Sharer(list(token_ids), self.cache.allocate(token_ids, match), len(match.path) * self.page_size)
        self.sharers.append(sharer)

    def evict_in_model(self, num_wanted: int) -> None:
        num_known = len(self.naive.known)
        num_unready = sum(len(sharer.allocation.path) - sharer.allocation.num_ready for sharer in self.sharers)
        owned = sum(num_owned(sharer.allocation) for sharer in self.sharers)
        num_free = self.cache.num_pages - num_known - num_unready - owned
        for _ in range(num_wanted - num_free):
            leaf = self.naive.leaf_to_evict()
            assert leaf is not None
            del self.naive.known[leaf]

    @precondition(lambda self: self.sharers)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        sharer = data.draw(st.sampled_from(self.sharers))
        if sharer.num_computed == len(sharer.token_ids):
            return
        end = data.draw(st.integers(sharer.num_computed + 1, len(sharer.token_ids)))
        for position in range(sharer.num_computed, end):
            self.content[sharer.allocation.pages[position // self.page_size]] = sharer.prefix(position + 1)
        sharer.num_computed = end
        before = sharer.allocation.num_ready
        self.cache.insert(sharer.allocation, sharer.token_ids, end)
        for index in range(before, sharer.allocation.num_ready):
            prefix = sharer.prefix((index + 1) * self.page_size)
            self.naive.known.setdefault(prefix, Known()).num_locks += 1
        assert sharer.allocation.num_ready <= end // self.page_size

    @precondition(lambda self: self.sharers)
    @rule(data=st.data(), token_id=st.integers(0, 1))
    def decode(self, data: st.DataObject, token_id: int) -> None:
        sharer = data.draw(st.sampled_from(self.sharers))
        if len(sharer.token_ids) == sharer.allocation.capacity:
            could = self.cache.num_allocatable > 0
            if could:
                self.evict_in_model(1)
            assert (self.cache.grow(sharer.allocation) is not None) == could
            if not could:
                return
        sharer.token_ids.append(token_id)

    @precondition(lambda self: self.sharers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        sharer = self.sharers.pop(data.draw(st.integers(0, len(self.sharers) - 1)))
        self.naive.time += 1
        for index in range(sharer.allocation.num_ready):
            entry = self.naive.known[sharer.prefix((index + 1) * self.page_size)]
            entry.num_locks -= 1
            entry.given_up = self.naive.time
        self.cache.release(sharer.allocation)

    @precondition(lambda self: self.sharers)
    @rule(data=st.data(), session=SESSIONS)
    def pin(self, data: st.DataObject, session: int) -> None:
        sharer = data.draw(st.sampled_from(self.sharers))
        pinned = self.naive.pins.setdefault(session, [])
        self.naive.touch(session)
        for index in range(sharer.allocation.num_ready):
            if (prefix := sharer.prefix((index + 1) * self.page_size)) not in pinned:
                pinned.append(prefix)
                self.naive.known[prefix].num_pins += 1
        self.cache.pin(session, sharer.allocation)

    @rule(session=SESSIONS)
    def touch(self, session: int) -> None:
        self.naive.touch(session)
        self.cache.touch(session)

    @rule(session=SESSIONS)
    def unpin(self, session: int) -> None:
        self.naive.unpin(session)
        self.cache.unpin(session)

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        evicted = self.cache.evict(count)
        for _ in range(evicted):
            leaf = self.naive.leaf_to_evict()
            assert leaf is not None
            del self.naive.known[leaf]
        assert evicted == count or self.naive.leaf_to_evict() is None

    @invariant()
    def pages_add_up(self) -> None:
        if not hasattr(self, "cache"):
            return
        allocations = [sharer.allocation for sharer in self.sharers]
        check_cache(self.cache, allocations)
        num_unready = sum(len(allocation.path) - allocation.num_ready for allocation in allocations)
        assert self.cache.num_cached == len(self.naive.known) + num_unready
        num_used = sum(entry.num_locks > 0 for entry in self.naive.known.values())
        num_pinned = sum(not entry.num_locks and entry.num_pins > 0 for entry in self.naive.known.values())
        assert self.cache.num_pinned == num_pinned
        owned = sum(map(num_owned, allocations))
        assert self.cache.num_allocatable == self.cache.num_pages - num_used - num_unready - owned


TestCache = CacheMachine.TestCase
