"""Snapshots of states in the prefix cache: a request starts with the state of its own tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aioengine.memory.prefix_cache import Allocation, PrefixCache
from aioengine.memory.snapshots import NO_SNAPSHOT, NUM_ROLLING, Snapshots
from tests.kit.integrity import check_cache

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=20)


def make_cache(*, num_snapshots: int = 4, num_pages: int = 64, page_size: int = 2, span: int = 4) -> PrefixCache:
    snapshots = Snapshots(num_snapshots, span=span, page_size=page_size)
    return PrefixCache(num_pages=num_pages, page_size=page_size, snapshots=snapshots)


@dataclass
class Running:
    """A request: its tokens, its pages, and the number of computed tokens."""

    token_ids: list[int]
    allocation: Allocation
    num_computed: int


class World:
    """A cache, and the tokens in the state of each snapshot, by its id."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        assert cache.snapshots is not None
        self.snapshots = cache.snapshots
        self.seen_by_id: dict[int, list[int]] = {}
        self.running: list[Running] = []

    def open(self, token_ids: list[int], salt: str = "") -> Running | None:
        """Open a request. Return None if it has to wait, or if there are no pages."""
        match = self.cache.match(token_ids, salt)
        if match.pending is not None:
            assert match.missing_snapshot is not None
            self.snapshots.stop_at(match.missing_snapshot)
            return None
        if self.cache.num_left(match, len(token_ids), 0) < 0:
            return None
        allocation = self.cache.allocate(token_ids, match)
        own = allocation.snapshots
        assert own is not None
        num_cached = len(match.path) * self.cache.page_size
        seen = self.seen_by_id[own.source] if own.source != NO_SNAPSHOT else []
        assert seen == [*token_ids[:num_cached], *([salt] if num_cached else [])]
        self.snapshots.stop_before(own, num_cached, len(token_ids))
        self.running.append(Running(token_ids, allocation, num_cached))
        return self.running[-1]

    def compute(self, request: Running, num_tokens: int) -> None:
        """Compute a row of up to ``num_tokens`` tokens."""
        allocation, start, length = request.allocation, request.num_computed, len(request.token_ids)
        assert allocation.snapshots is not None
        end = self.snapshots.end_of_row(allocation.snapshots, start, min(start + num_tokens, length), length)
        assert start < end <= length
        if (
            end % self.snapshots.span == 0
            and (snapshot_id := self.snapshots.take(allocation.snapshots, end)) != NO_SNAPSHOT
        ):
            self.seen_by_id[snapshot_id] = [*request.token_ids[:end], allocation.salt]  # type: ignore[list-item]
        request.num_computed = end
        if end >= allocation.next_insert_at:
            self.cache.insert(allocation, request.token_ids, end)

    def close(self, request: Running, *, is_invalid: bool = False) -> None:
        self.running.remove(request)
        self.cache.release(request.allocation, is_invalid=is_invalid)

    def answer(self, token_ids: list[int], num_tokens: int = 1) -> int:
        """Compute a request alone, in rows of this many tokens. Return the number of reused tokens."""
        request = self.open(token_ids)
        assert request is not None
        num_cached = request.num_computed
        while request.num_computed < len(token_ids):
            self.compute(request, num_tokens)
        self.close(request)
        return num_cached


class Storm(RuleBasedStateMachine):
    """Requests over two token ids, so that they share many prefixes."""

    @initialize(num_snapshots=st.integers(0, 6), num_pages=st.sampled_from([12, 40]), span=st.sampled_from([2, 4, 6]))
    def begin(self, num_snapshots: int, num_pages: int, span: int) -> None:
        self.world = World(make_cache(num_snapshots=num_snapshots, num_pages=num_pages, span=span))

    @rule(token_ids=TOKENS, salt=st.sampled_from(["", "", "a"]))
    def open(self, token_ids: list[int], salt: str) -> None:
        self.world.open(token_ids, salt)

    @precondition(lambda self: self.world.running)
    @rule(place=st.integers(0, 99), num_tokens=st.integers(1, 20), token=st.integers(0, 1))
    def compute(self, place: int, num_tokens: int, token: int) -> None:
        request = self.world.running[place % len(self.world.running)]
        if request.num_computed == len(request.token_ids):  # like a sampled token
            if (
                request.num_computed == request.allocation.capacity
                and self.world.cache.grow(request.allocation) is None
            ):
                return
            request.token_ids = [*request.token_ids, token]
        self.world.compute(request, num_tokens)

    @precondition(lambda self: self.world.running)
    @rule(place=st.integers(0, 99), is_invalid=st.booleans(), session=st.integers(0, 3))
    def close(self, place: int, is_invalid: bool, session: int) -> None:
        request = self.world.running[place % len(self.world.running)]
        if session and not is_invalid:
            self.world.cache.pin(session, request.allocation)
        self.world.close(request, is_invalid=is_invalid)

    @rule(num_pages=st.integers(1, 9), session=st.integers(1, 3))
    def evict(self, num_pages: int, session: int) -> None:
        self.world.cache.unpin(session)
        self.world.cache.evict(num_pages)

    @invariant()
    def holds(self) -> None:
        check_cache(self.world.cache, (request.allocation for request in self.world.running))


TestStorm = Storm.TestCase


def test_the_newest_snapshots_of_a_request_stay() -> None:
    world = World(make_cache(num_snapshots=9))
    request = world.open([1])
    assert request is not None
    for length in range(1, 30):
        world.compute(request, 1)
        assert len(world.snapshots._ids) == min(length // 4, NUM_ROLLING)
        if length == request.allocation.capacity:
            world.cache.grow(request.allocation)
        request.token_ids = [*request.token_ids, length]
    world.close(request)
    ids = [1, *range(1, 30)]
    assert world.answer(ids) == 28
    assert world.answer([*ids[:27], 0]) == 24


def test_the_snapshot_of_a_prompt_is_taken_before_its_last_token() -> None:
    """The same prompt continues from it, and computes at least one token."""
    world = World(make_cache())
    assert [world.answer(list(range(12)), 12) for _ in range(2)] == [0, 8]


def test_requests_wait_for_pages_that_replaced_evicted_ones() -> None:
    world = World(make_cache(num_pages=8))
    world.answer([1, 1, 1, 1, 1, 1], 6)
    token_ids = [1, 1, 1, 1, *range(12)]
    request = world.open(token_ids)
    assert request is not None
    assert world.cache.match([*token_ids, 5]).pending is request.allocation.path[7]
    while request.num_computed < len(token_ids):
        world.compute(request, 20)
    world.close(request)
    assert world.open([*token_ids[:13], 5]) is not None


def test_wrong_states_are_not_kept() -> None:
    world = World(make_cache())
    request = world.open(list(range(9)))
    assert request is not None
    world.compute(request, 8)
    assert len(world.snapshots._ids) == 1
    world.close(request, is_invalid=True)
    assert len(world.snapshots._ids) == 0


@pytest.mark.parametrize("is_second_wrong", [False, True])
def test_wrong_snapshots_are_not_stored(is_second_wrong: bool) -> None:
    world, token_ids = World(make_cache()), list(range(7))
    first = world.open(token_ids)
    assert first is not None
    world.compute(first, 7)
    second = world.open(token_ids)
    assert second is not None
    world.compute(second, 7)
    assert (second.num_computed, len(world.snapshots._ids)) == (4, 1)
    for request, is_wrong in ((second, is_second_wrong), (first, not is_second_wrong)):
        world.close(request, is_invalid=is_wrong)
        check_cache(world.cache, (request.allocation for request in world.running))
    assert len(world.snapshots._ids) == 0
