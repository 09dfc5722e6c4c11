"""The queue limits hold, and every queued caller is served, in any order of events."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.errors import EngineClosedError, EngineOverloadedError
from aioengine.frontend.calls import overload
from aioengine.frontend.calls.overload import RESERVED_S, QueuedCaller, QueueLimits, Reservation
from aioengine.settings.config import QueueConfig

RUNNING, QUEUED = 1, 2


class World:
    """QueueLimits, open calls, and the order in which callers got capacity."""

    def __init__(self, **bounds: int) -> None:
        self.limits = QueueLimits(QueueConfig(max_requests=QUEUED, **bounds), max_running=RUNNING, max_total_tokens=100)
        self.opened: list[Reservation] = []
        self.woken: list[int] = []
        self.gone: set[int] = set()
        self.now = 100.0

    def enter(self, caller: int) -> QueuedCaller:
        place = QueuedCaller(caller, partial(self.wake, caller))
        self.limits.enter(place, self.now)
        return place

    def wake(self, caller: int) -> bool:
        if caller in self.gone:
            return False
        self.woken.append(caller)
        return True

    def has_capacity(self, place: QueuedCaller) -> bool:
        return self.limits._reserved.get(place.caller) is place

    def open_call(self, caller: int = -1, *, num_bytes: int = 0) -> bool:
        """Open a call, unless it is refused."""
        reservation = Reservation(self.limits)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(overload, "this_caller", lambda: caller)
                self.limits.reserve(reservation)
        except EngineOverloadedError:
            return False
        self.limits.add_bytes(reservation, num_bytes)
        self.opened.append(reservation)
        return True

    def close(self) -> None:
        self.limits.release(self.opened.pop(), self.now)

    def fill(self) -> None:
        """Open as many calls as fit."""
        while self.open_call():
            pass


def test_capacity_is_reserved_in_order_and_used_only_by_its_callers() -> None:
    world = World()
    world.fill()
    assert len(world.opened) == RUNNING + QUEUED
    for caller in (1, 2, 3):
        world.enter(caller)
    assert world.woken == []
    world.close()
    assert world.woken == [1]
    assert [world.open_call(caller) for caller in (2, 1, 1)] == [False, True, False]


def test_next_waiter_gets_capacity_that_is_not_used_in_time() -> None:
    world = World()
    for caller in range(RUNNING + QUEUED + 1):
        world.enter(caller)
    assert world.woken == [0, 1, 2]
    assert world.limits.due_at == world.now + RESERVED_S
    world.now += RESERVED_S
    world.limits.serve(world.now)
    assert world.woken == [0, 1, 2, 3]
    # two of the three places are free again
    assert [world.open_call(caller) for caller in (0, 0, 0, 3)] == [True, True, False, True]
    assert world.limits.due_at is None


def test_waiter_that_cannot_be_woken_gets_no_capacity() -> None:
    world = World()
    world.fill()
    places = [world.enter(caller) for caller in (1, 2, 3)]
    world.gone = {1, 2}
    world.close()
    assert world.woken == [3]
    assert [world.has_capacity(place) for place in places] == [False, False, True]
    assert len(world.limits._queue) == 0
    for place in places:
        world.limits.remove(place, world.now)
    assert world.open_call(4)


def test_a_closed_engine_wakes_all_waiters_with_the_error() -> None:
    world = World(max_bytes=0)
    place = world.enter(1)
    error = EngineClosedError("closed")
    world.limits.refuse(error)
    assert (world.has_capacity(place), place.error, world.woken, len(world.limits._queue)) == (False, error, [1], 0)
    with pytest.raises(EngineClosedError):
        world.open_call(1)
    with pytest.raises(EngineClosedError):
        world.enter(1)


@pytest.mark.parametrize(
    ("bounds", "words"), [({"max_tokens": 50}, "50 prompt tokens are waiting"), ({"max_bytes": 7}, "7 bytes")]
)
def test_every_limit_refuses_calls_until_others_end(bounds: dict[str, int], words: str) -> None:
    world = World(**bounds)
    assert world.open_call(0, num_bytes=7)
    world.limits.add_row(world.opened[0], 0, 150)
    with pytest.raises(EngineOverloadedError, match=words):
        world.limits.reserve(Reservation(world.limits))
    world.close()
    assert world.open_call()


@pytest.mark.parametrize("ends_by_row", [True, False])
def test_the_tokens_of_a_prompt_count_once_for_all_its_rows(ends_by_row: bool) -> None:
    world = World()
    assert world.open_call()
    [call] = world.opened
    for prompt, num_tokens in ((0, 20), (0, 20), (1, 3)):
        world.limits.add_row(call, prompt, num_tokens)
    assert world.limits.num_tokens == 23
    if ends_by_row:
        world.limits.end_row(call, 0, 20, world.now)
        assert world.limits.num_tokens == 23
        world.limits.end_row(call, 0, 20, world.now)
        assert world.limits.num_tokens == 3
    world.close()
    world.limits.release(call, world.now)  # a second release has no effect
    assert (world.limits.num_tokens, world.limits.num_calls) == (0, 0)


def test_rows_of_a_released_call_are_not_counted() -> None:
    """The opening of the call was interrupted while the engine's thread was already starting its rows."""
    world = World()
    assert world.open_call()
    [call] = world.opened
    world.limits.add_row(call, 0, 20)
    world.close()
    world.limits.add_row(call, 1, 3)
    for prompt, num_tokens in ((0, 20), (1, 3)):
        world.limits.end_row(call, prompt, num_tokens, world.now)
    assert (world.limits.num_tokens, world.limits.num_calls) == (0, 0)


@pytest.mark.parametrize("is_refused", [False, True])
def test_waiter_can_leave_while_another_is_woken(is_refused: bool) -> None:
    """Garbage collection removes their tasks at that moment."""
    world = World()
    world.fill()
    places = [world.enter(caller) for caller in (1, 2)]

    def leave() -> bool:
        world.limits.remove(places[0], world.now)
        return True

    places[0].wake = leave
    if is_refused:
        world.limits.refuse(EngineClosedError("closed"))
    else:
        world.close()
    assert (world.woken, len(world.limits._queue)) == ([2], 0)
    assert [world.has_capacity(place) for place in places] == [False, not is_refused]


def test_caller_that_waits_twice_gets_one_place() -> None:
    world = World()
    for caller in (1, 2, 1):
        world.enter(caller)
        world.now += RESERVED_S / 4
    world.now += RESERVED_S / 2  # the places of caller 2, and the first place of caller 1, are used up
    world.limits.serve(world.now)
    assert world.limits.due_at == world.now - RESERVED_S / 4 - RESERVED_S / 2 + RESERVED_S
    world.fill()
    assert [world.open_call(caller) for caller in (2, 1, 1)] == [False, True, False]


@given(st.lists(st.tuples(st.sampled_from(["enter", "leave", "open", "close", "wait"]), st.integers(0, 7))))
def test_counts_are_right_after_any_sequence_of_calls(events: list[tuple[str, int]]) -> None:
    """A caller is in the queue once at a time."""
    world, places = World(), dict[int, QueuedCaller]()
    for event, caller in events:
        if event == "enter" and caller not in places:
            places[caller] = world.enter(caller)
        elif event == "leave" and caller in places:
            world.limits.remove(places.pop(caller), world.now)
        elif event == "open" and world.open_call(caller, num_bytes=1):
            places.pop(caller, None)
        elif event == "close" and world.opened:
            world.close()
        elif event == "wait":
            world.now += RESERVED_S / 2
            world.limits.serve(world.now)
        assert len(world.opened) == world.limits.num_calls == world.limits.num_bytes <= RUNNING + QUEUED
        if world.limits._excess() is None:  # pyright: ignore[reportPrivateUsage]
            assert len(world.limits._queue) == 0
    while world.opened:
        world.close()
    for _ in range(20):
        world.now += RESERVED_S
        world.limits.serve(world.now)
    assert len(world.limits._queue) == 0
    assert world.open_call()
