"""How much may wait, and the line: nobody is let in too many, nobody is forgotten, whatever happens in any order."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.config import QueueConfig
from aioengine.errors import EngineClosedError, EngineOverloadedError
from aioengine.frontend.room import PLACE_S, Place, Room

RUNNING, QUEUED = 1, 2


class World:
    """A room, who has a place, and the order in which places were given."""

    def __init__(self, **bounds: int) -> None:
        self.room = Room(QueueConfig(max_requests=QUEUED, **bounds), max_running=RUNNING, max_total_tokens=100)
        self.woken: list[int] = []
        self.gone: set[int] = set()
        self.now = 100.0

    def enter(self, caller: int) -> Place:
        place = Place(caller, partial(self.wake, caller))
        self.room.enter_line(place, self.now)
        return place

    def wake(self, caller: int) -> bool:
        if caller in self.gone:
            return False
        self.woken.append(caller)
        return True

    def take(self, caller: int, num_bytes: int) -> None:
        """As ``Calls.open`` does."""
        self.room.use_place(caller)
        self.room.num_calls += 1
        self.room.num_bytes += num_bytes

    def is_refused(self, caller: int = -1) -> bool:
        try:
            self.room.check(caller)
        except EngineOverloadedError:
            return True
        return False


def test_places_are_given_in_order_and_only_to_whom_they_are_for() -> None:
    world = World()
    for _ in range(RUNNING + QUEUED):
        world.take(0, 0)
    for caller in (1, 2, 3):
        world.enter(caller)
    assert world.woken == []
    world.room.give_back(0, 0, world.now)
    assert world.woken == [1]
    assert world.is_refused(2)
    assert not world.is_refused(1)
    world.take(1, 0)
    assert world.is_refused(1)


def test_a_place_that_is_not_used_goes_on() -> None:
    world = World()
    for caller in range(RUNNING + QUEUED + 1):
        world.enter(caller)
    assert world.woken == [0, 1, 2]
    assert world.room.due_at == world.now + PLACE_S
    world.now += PLACE_S
    world.room.serve(world.now)
    assert world.woken == [0, 1, 2, 3]
    assert world.is_refused(0) is False  # two of the three places are free again
    world.take(0, 0)
    world.take(0, 0)
    assert world.is_refused(0)
    world.take(3, 0)
    assert world.room.due_at is None


def test_a_place_is_not_given_to_a_waiter_that_cannot_be_woken() -> None:
    world = World()
    for _ in range(RUNNING + QUEUED):
        world.take(0, 0)
    places = [world.enter(caller) for caller in (1, 2, 3)]
    world.gone = {1, 2}
    world.room.give_back(0, 0, world.now)
    assert world.woken == [3]
    assert [place.is_given for place in places] == [False, False, True]
    assert world.room.num_in_line == 0
    for place in places:
        world.room.leave_line(place, world.now)
    assert not world.is_refused(4)


def test_nobody_waits_for_an_engine_that_takes_nothing() -> None:
    world = World(max_bytes=0)
    place = world.enter(1)
    error = EngineClosedError("closed")
    world.room.fail(error)
    assert (place.is_given, place.error, world.woken, world.room.num_in_line) == (False, error, [1], 0)


@pytest.mark.parametrize(
    ("bounds", "words"), [({"max_tokens": 50}, "150 prompt|50 prompt"), ({"max_bytes": 7}, "7 bytes")]
)
def test_every_bound_refuses_and_gives_way(bounds: dict[str, int], words: str) -> None:
    world = World(**bounds)
    world.take(0, 7)
    world.room.num_tokens += 150
    with pytest.raises(EngineOverloadedError, match=words):
        world.room.check(0)
    world.room.give_back(150, 7, world.now)
    assert not world.is_refused()


@given(st.lists(st.tuples(st.sampled_from(["enter", "leave", "open", "close", "wait"]), st.integers(0, 7))))
def test_counts_hold_in_any_order(acts: list[tuple[str, int]]) -> None:
    """A caller stands in line once at a time and opens a call only where ``check`` lets it."""
    world, places, num_open = World(), dict[int, Place](), 0
    for act, caller in acts:
        if act == "enter" and caller not in places:
            places[caller] = world.enter(caller)
        elif act == "leave" and caller in places:
            world.room.leave_line(places.pop(caller), world.now)
        elif act == "open" and not world.is_refused(caller):
            world.take(caller, 1)
            places.pop(caller, None)
            num_open += 1
        elif act == "close" and num_open:
            world.room.give_back(0, 1, world.now)
            num_open -= 1
        elif act == "wait":
            world.now += PLACE_S / 2
            world.room.serve(world.now)
        assert num_open == world.room.num_calls == world.room.num_bytes <= RUNNING + QUEUED
        if not world.is_refused():
            assert world.room.num_in_line == 0
    for _ in range(num_open):
        world.room.give_back(0, 1, world.now)
    for _ in range(20):
        world.now += PLACE_S
        world.room.serve(world.now)
    assert world.room.num_in_line == 0
    assert not world.is_refused()
