"""Slots of adapters: which adapters are placed, which requests wait, and no request waits forever."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioengine.memory.adapter_slots import AdapterSlots, Waiter
from tests.kit.integrity import check_slots

if TYPE_CHECKING:
    from aioengine.memory.adapter_slots import Key

A, B, C, D = (("a",), ("b",), ("c",), ("d",))
ALL = (A, B, C, D)


def waiter(uid: int, tenant: str = "") -> Waiter:
    return Waiter(uid, tenant, (float(uid),))


def assigned(slots: AdapterSlots, copies: tuple[Key, ...]) -> tuple[list[tuple[int, Key]], list[int]]:
    return slots.assign([claim for claim in slots.claims() if claim[1] in copies])


class Desk:
    """Requests slots like a scheduler. Requests are admitted or wait."""

    def __init__(self, num_slots: int, *, quantum: int = 1, tenants: dict[str, float] | None = None) -> None:
        self.tenants = {} if tenants is None else tenants
        self.slots = AdapterSlots(num_slots, quantum=quantum, turn=lambda tenant: self.tenants.get(tenant, 0.0))
        self.needs: dict[int, tuple[Key, Waiter]] = {}
        self.queue: list[int] = []
        self.running: dict[int, int] = {}

    def ask(self, uid: int, key: Key, tenant: str = "") -> bool:
        """Request a slot. Return whether the request runs now."""
        self.needs[uid] = key, waiter(uid, tenant)
        self.queue.append(uid)
        self.admit()
        return uid in self.running

    def admit(self) -> None:
        for uid in sorted(self.queue):
            key, waiting = self.needs[uid]
            self.queue.remove(uid)
            if self.slots.may_use(key, waiting):
                self.running[uid] = self.slots.use(key, waiting)
            else:
                self.slots.wait(key, waiting)

    def end(self, uid: int) -> None:
        self.running.pop(uid, None)
        self.slots.leave(uid)

    def assign(self, copies: tuple[Key, ...] = ALL) -> list[Key]:
        """Place and copy adapters, admit the released requests, and return the placed adapters."""
        placed: list[Key] = []
        while True:
            assignments, released = assigned(self.slots, copies)
            for _, key in assignments:
                self.slots.placed(key)
                placed.append(key)
            self.queue += released
            self.admit()
            check_slots(self.slots)
            if not self.slots.is_changed:
                return placed


def test_an_adapter_is_placed_for_its_request_and_stays() -> None:
    desk = Desk(2)
    assert not desk.ask(1, A)
    assert [key for _, key in desk.slots.claims()] == [A]
    assert desk.assign() == [A]
    assert desk.running == {1: 1}
    desk.end(1)
    assert desk.ask(2, A)
    assert desk.assign() == []


def test_an_adapter_that_is_not_in_memory_blocks_no_slot() -> None:
    desk = Desk(1)
    desk.ask(1, A)
    desk.ask(2, B)
    assert desk.assign((B,)) == [B]
    assert [key for _, key in desk.slots.claims()] == [A]


def test_the_least_recently_used_slot_is_replaced() -> None:
    desk = Desk(2)
    for uid, key in enumerate((A, B, A)):
        desk.ask(uid, key)
        desk.assign()
        desk.end(uid)
    desk.ask(3, C)
    assert desk.assign() == [C]
    assert desk.slots.has(A)
    assert not desk.slots.has(B)


def test_longest_waiting_adapter_gets_the_next_slot() -> None:
    desk = Desk(1)
    desk.ask(0, A)
    desk.assign()
    desk.ask(2, C)
    desk.ask(1, B)
    desk.assign()
    desk.end(0)
    assert desk.assign() == [B]


def test_new_requests_of_an_adapter_wait_for_an_earlier_request_of_another() -> None:
    desk = Desk(1, quantum=2)
    desk.ask(0, A)
    desk.assign()
    desk.ask(2, B)
    desk.assign()
    assert desk.ask(1, A), "it came before"
    assert not desk.ask(3, A)
    assert desk.assign() == []
    desk.end(0)
    desk.end(1)
    assert desk.assign() == [B]
    assert desk.running == {2: 1}
    desk.end(2)
    assert desk.assign() == [A]


def test_an_adapter_keeps_its_slot_for_its_quantum_of_requests() -> None:
    desk = Desk(1, quantum=3)
    desk.ask(0, A)
    desk.ask(1, B)
    desk.assign()
    assert desk.ask(2, A)
    assert desk.ask(3, A)
    assert not desk.ask(4, A)


def test_only_as_many_slots_drain_as_adapters_wait() -> None:
    desk = Desk(2)
    desk.ask(0, A)
    desk.ask(1, B)
    desk.assign()
    desk.ask(2, C)
    desk.assign()
    assert [desk.ask(3, A), desk.ask(4, B)].count(True) == 1
    desk.slots.leave(2)
    desk.assign()
    assert not desk.slots.claims()
    assert desk.running.keys() == {0, 1, 3, 4}


def test_the_tenant_that_used_least_is_first() -> None:
    desk = Desk(1, tenants={"much": 100.0, "little": 1.0})
    desk.ask(0, A, "much")
    desk.assign()
    for uid, key in ((1, B), (2, C)):
        desk.ask(uid, key, "much")
    desk.ask(3, D, "little")
    desk.assign()
    assert not desk.ask(4, A, "much")
    desk.end(0)
    assert desk.assign() == [D]


def test_a_pinned_adapter_is_placed_without_requests_and_keeps_its_slot() -> None:
    desk = Desk(2)
    desk.slots.pin(A, 1)
    desk.slots.pin(A, 2)
    assert desk.assign() == [A]
    for uid, key in enumerate((B, C, D)):
        desk.ask(uid, key)
        assert desk.assign() == [key]
        desk.end(uid)
    desk.slots.unpin(A, 1)
    assert desk.slots.has(A)
    desk.slots.drop(A)
    assert desk.slots.has(A)
    desk.slots.unpin(A, 2)
    desk.slots.drop(A)
    assert not desk.slots.has(A)


def test_adapter_pinned_during_a_drain_serves_all_its_requests() -> None:
    desk = Desk(2)
    for uid, key in enumerate((A, B)):
        desk.ask(uid, key)
        desk.assign()
    desk.ask(2, C)
    desk.ask(3, D)
    desk.assign()
    assert not desk.ask(4, A)
    desk.slots.pin(A, 1)
    desk.assign()
    assert 4 in desk.running
    assert not desk.ask(5, B)


def test_a_copy_that_fails_leaves_an_empty_slot() -> None:
    desk = Desk(1)
    desk.ask(0, A)
    assignments, _ = assigned(desk.slots, ALL)
    assert assignments == [(1, A)]
    desk.slots.fail(A)
    assert desk.slots.load_queue.uids(A) == [0]
    desk.slots.leave(0)
    desk.ask(1, B)
    assert desk.assign() == [B]


def test_a_slot_of_released_requests_is_assigned_to_an_adapter_that_ranks_before_them() -> None:
    """Released requests may wait long for pages after other requests. The other adapter must not wait for them."""
    desk = Desk(1)
    desk.slots.wait(B, waiter(5))
    assigned(desk.slots, (B,))
    desk.slots.placed(B)
    assert assigned(desk.slots, (B,))[1] == [5]
    desk.slots.wait(C, waiter(7))
    assert assigned(desk.slots, ALL)[0] == []
    desk.slots.wait(A, waiter(1))
    assert assigned(desk.slots, ALL)[0] == [(1, A)]
    assert not desk.slots.may_use(B, waiter(5))
    check_slots(desk.slots)


def test_a_released_request_that_waits_again_is_queued_once() -> None:
    desk = Desk(1)
    desk.slots.wait(A, waiter(5))
    assigned(desk.slots, ALL)
    desk.slots.placed(A)
    assert assigned(desk.slots, ALL)[1] == [5]
    desk.slots.wait(A, waiter(5))
    desk.slots.leave(5)
    assert desk.slots.load_queue.uids(A) == []


@pytest.mark.parametrize("num_slots", [1, 2, 8])
@pytest.mark.parametrize("quantum", [1, 4])
def test_all_requests_of_many_adapters_are_served(num_slots: int, quantum: int) -> None:
    """Four requests run at a time. Few later requests overtake a waiting one."""
    numbers = random.Random(num_slots)
    desk = Desk(num_slots, quantum=quantum)
    keys = [(str(number),) for number in range(12)]
    waiting = deque((uid, keys[min(numbers.randrange(12), numbers.randrange(12))]) for uid in range(400))
    served: list[int] = []
    while waiting or desk.needs.keys() - served:
        for _ in range(min(4, len(waiting))):
            desk.ask(*waiting.popleft())
        desk.assign(tuple(keys))
        assert desk.running, "somebody runs"
        for uid in numbers.sample(sorted(desk.running), min(4, len(desk.running))):
            served.append(uid)
            desk.end(uid)
    assert sorted(served) == list(range(400))
    overtakers = [sum(later > uid for later in served[:place]) for place, uid in enumerate(served)]
    assert max(overtakers) < 150


STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "leave", "assign", "pin", "unpin", "drop"]), st.integers(0, 30)),
    max_size=80,
)


class Events:
    """Random events. Events that are impossible in the current state do nothing."""

    def __init__(self, num_slots: int, quantum: int) -> None:
        self.desk = Desk(num_slots, quantum=quantum)
        self.num_asked = 0
        self.pinned: dict[int, Key] = {}
        self.max_pins = num_slots - 1

    def ask(self, number: int) -> None:
        self.desk.ask(self.num_asked, ALL[number % len(ALL)])
        self.num_asked += 1

    def leave(self, number: int) -> None:
        living = sorted(self.desk.needs)
        if living:
            uid = living[number % len(living)]
            self.desk.end(uid)
            del self.desk.needs[uid]

    def assign(self, number: int) -> None:
        self.desk.assign(ALL[number % 2 :])

    def pin(self, number: int) -> None:
        if len(self.pinned) < self.max_pins:
            self.pinned[number] = ALL[number % len(ALL)]
            self.desk.slots.pin(self.pinned[number], number)

    def unpin(self, number: int) -> None:
        if number in self.pinned:
            self.desk.slots.unpin(self.pinned.pop(number), number)

    def drop(self, number: int) -> None:
        self.desk.slots.drop(ALL[number % len(ALL)])


@settings(deadline=None, max_examples=200)
@given(steps=STEPS, num_slots=st.integers(1, 3), quantum=st.integers(1, 3))
def test_any_order_of_events_serves_every_request(steps: list[tuple[str, int]], num_slots: int, quantum: int) -> None:
    events = Events(num_slots, quantum)
    desk = events.desk
    for what, number in steps:
        getattr(events, what)(number)
        check_slots(desk.slots)
        for uid, slot in desk.running.items():
            assert desk.slots.slot_of(uid) == slot
            assert desk.slots.has(desk.needs[uid][0])
    for _ in range(2 * events.num_asked + 2):
        desk.assign()
        for uid in list(desk.running):
            desk.end(uid)
            del desk.needs[uid]
    assert not desk.needs
    assert all(desk.slots.has(key) for key in events.pinned.values())
