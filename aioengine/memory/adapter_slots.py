"""AdapterSlots assigns LoRA adapters to slots of the device, and decides which requests may use them.

A request uses the slot of its adapter from its admission until it ends or is preempted. Before, it may wait in the load
queue: its adapter is not in a slot, is being copied, or is about to be replaced. Then the request is *released*: it
returns to the scheduler's queue, and its adapter stays in its slot until the request is admitted.

The load queue is ordered by rank: first the tenant that has used the least, then the position in the scheduler's queue.
A waiting adapter gets the least recently used slot without running requests. Adapters are served by the rank of their
first request. If every slot is in use, as many slots as there are waiting adapters are *draining*: after ``quantum``
requests, a draining adapter accepts only requests that rank before all requests of waiting adapters. So every slot
becomes free at some time, and a busy adapter is not replaced for each single request.

A pinned adapter is loaded without a request and keeps its slot. At least one slot must stay unpinned. Only running
requests use slots, and these never wait for another slot, so there is no deadlock.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

from msgspec import Struct

Key = tuple[str, ...]
"""Identifies the files of an adapter. Two adapter names may have the same key."""

Rank = tuple[float, ...]
PINNED: Rank = (-math.inf,)


class Waiter(NamedTuple):
    """A request that needs an adapter. ``order``: its unique position in the scheduler's queue."""

    uid: int
    tenant: str
    order: tuple[float, ...]


class _Slot(Struct, eq=False):
    """One slot.

    key: its adapter, or None. is_ready: the adapter is copied. running: uids of running requests. released: requests
    that were released and are not admitted yet. num_served: admissions since the adapter was assigned. last_used:
    number of uses of all slots at its last use.
    """

    number: int
    key: Key | None = None
    is_ready: bool = False
    is_draining: bool = False
    num_served: int = 0
    last_used: int = 0
    running: set[int] = set()
    released: dict[int, Waiter] = {}

    def assign(self, key: Key | None) -> None:
        """Assign another adapter, or none."""
        self.key = key
        self.is_ready = False
        self.is_draining = False
        self.num_served = 0
        self.released.clear()


class LoadQueue:
    """The requests that wait for adapters.

    turn: returns how much a tenant has used so far; the smallest is first.
    """

    def __init__(self, turn: Callable[[str], float]) -> None:
        self._turn = turn
        self._waiters: dict[int, tuple[Key, Waiter]] = {}
        self._by_key: dict[Key, dict[str, list[tuple[tuple[float, ...], int]]]] = {}  # adapter -> tenant -> sorted uids

    @property
    def keys(self) -> list[Key]:
        """The adapters for which requests wait."""
        return list(self._by_key)

    def rank(self, waiter: Waiter) -> Rank:
        """Return the sort key of a waiting request; the smallest is first."""
        return (self._turn(waiter.tenant), *waiter.order)

    def uids(self, key: Key) -> list[int]:
        """Return the requests that wait for an adapter, also while it drains."""
        return [uid for waiting in self._by_key.get(key, {}).values() for _, uid in waiting]

    def first(self, key: Key) -> Waiter | None:
        """Return the first waiting request of an adapter."""
        heads = [self._waiters[waiting[0][1]][1] for waiting in self._by_key.get(key, {}).values()]
        return min(heads, key=self.rank, default=None)

    def add(self, key: Key, waiter: Waiter) -> None:
        self._waiters[waiter.uid] = key, waiter
        insort(self._by_key.setdefault(key, {}).setdefault(waiter.tenant, []), (waiter.order, waiter.uid))

    def remove(self, uid: int) -> bool:
        """Remove a request. Return whether it was waiting."""
        entry = self._waiters.pop(uid, None)
        if entry is None:
            return False
        key, waiter = entry
        tenants = self._by_key[key]
        waiting = tenants[waiter.tenant]
        del waiting[bisect_left(waiting, (waiter.order, uid))]
        if not waiting:
            del tenants[waiter.tenant]
        if not tenants:
            del self._by_key[key]
        return True


class AdapterSlots:
    """The slots, numbered from 1, and the load queue. Only does the bookkeeping; ``processes.adapter_loading`` copies.

    Attributes:
        load_queue: the waiting requests. is_changed: ``assign`` may have something to do.
    """

    def __init__(self, num_slots: int, *, quantum: int, turn: Callable[[str], float] = lambda _: 0.0) -> None:
        """``turn``: as in ``LoadQueue``."""
        self._slots = [_Slot(number) for number in range(1, num_slots + 1)]
        self._quantum = max(1, quantum)
        self._by_key: dict[Key, _Slot] = {}
        self._keys: dict[int, Key] = {}  # uid -> adapter of a running or released request
        self._pins: dict[Key, set[int]] = {}
        self._first: Rank | None = None  # the first rank among waiting adapters that could be assigned
        self._num_uses = 0
        self.load_queue = LoadQueue(turn)
        self.is_changed = False

    # ------------------------------------------------------------ requests

    def may_use(self, key: Key, waiter: Waiter) -> bool:
        """Return whether the adapter of a request allows its admission now."""
        slot = self._by_key.get(key)
        return slot is not None and slot.is_ready and self._takes(slot, slot.num_served, waiter)

    def use(self, key: Key, waiter: Waiter) -> int:
        """Record the admission of a request after ``may_use`` returned True. Return its slot, valid until ``leave``."""
        slot = self._by_key[key]
        slot.released.pop(waiter.uid, None)
        slot.running.add(waiter.uid)
        slot.num_served += 1
        slot.last_used = self._num_uses = self._num_uses + 1
        self._keys[waiter.uid] = key
        return slot.number

    def wait(self, key: Key, waiter: Waiter) -> None:
        """Put the request into the load queue until it is released or leaves."""
        self.leave(waiter.uid)
        self.load_queue.add(key, waiter)
        self.is_changed = True

    def leave(self, uid: int) -> None:
        """The request does not need its adapter any more. Ignores unknown requests."""
        if (key := self._keys.pop(uid, None)) is not None:
            slot = self._by_key[key]
            slot.running.discard(uid)
            slot.released.pop(uid, None)
            if not slot.running:  # otherwise the slot is still in use
                self.is_changed = self.is_changed or bool(self.load_queue.keys or self._pins)
        elif self.load_queue.remove(uid):
            self.is_changed = True

    def slot_of(self, uid: int) -> int:
        """Return the slot that a running request uses."""
        return self._by_key[self._keys[uid]].number

    # ------------------------------------------------------------ adapters

    @property
    def num_placed(self) -> int:
        """Number of adapters in slots."""
        return sum(slot.is_ready for slot in self._by_key.values())

    def claims(self) -> list[tuple[Rank, Key]]:
        """Return the needed adapters that are in no slot, with the rank of their first request, in order of rank."""
        missing = [key for key in self.load_queue.keys if key not in self._by_key and key not in self._pins]
        claims = [(PINNED, key) for key in self._pins if key not in self._by_key]
        waiters = [(first, key) for key in missing if (first := self.load_queue.first(key)) is not None]
        claims += [(self.load_queue.rank(first), key) for first, key in waiters]
        claims.sort(key=itemgetter(0))
        return claims

    def assign(self, claims: list[tuple[Rank, Key]]) -> tuple[list[tuple[int, Key]], list[int]]:
        """Assign slots to waiting adapters, and release requests whose adapters are ready.

        claims: the entries of ``claims`` whose adapters are in memory; other adapters do not block a slot.
        Returns the slots and adapters to copy, each followed by ``placed`` or ``fail``, and the uids of the released
        requests.
        """
        self.is_changed = False
        self._drain(claims)
        released = self._release()
        assignments: list[tuple[int, Key]] = []
        for rank, key in claims:
            slot = self._free_slot(rank)
            if slot is None:
                break
            self._replace(slot, key)
            assignments.append((slot.number, key))
        if assignments:
            self._drain(claims[len(assignments) :])
            released += self._release()
        return assignments, released

    def placed(self, key: Key) -> None:
        """The adapter was copied into its slot."""
        self._by_key[key].is_ready = True
        self.is_changed = True

    def fail(self, key: Key) -> None:
        """The adapter could not be copied: its slot is empty. Its requests continue to wait."""
        self._by_key.pop(key).assign(None)
        self.is_changed = True

    def has(self, key: Key) -> bool:
        """Return whether an adapter is in a slot and ready."""
        slot = self._by_key.get(key)
        return slot is not None and slot.is_ready

    def pin(self, key: Key, adapter: int) -> None:
        """Load an adapter without a request, and keep it in its slot until ``unpin`` with the same number."""
        self._pins.setdefault(key, set()).add(adapter)
        self.is_changed = True

    def unpin(self, key: Key, adapter: int) -> None:
        """Remove a pin. Ignores unknown pins."""
        pins = self._pins.get(key, set())
        pins.discard(adapter)
        if not pins:
            self._pins.pop(key, None)
        self.is_changed = True

    def drop(self, key: Key) -> None:
        """Empty the slot of an adapter that no request will ask for again, unless it is pinned or in use."""
        slot = self._by_key.get(key)
        if slot is not None and slot.is_ready and not (slot.running or slot.released or key in self._pins):
            del self._by_key[key]
            slot.assign(None)

    # ------------------------------------------------------------ private

    def _takes(self, slot: _Slot, num_served: int, waiter: Waiter) -> bool:
        if not slot.is_draining or num_served < self._quantum or self._first is None:
            return True
        return self.load_queue.rank(waiter) < self._first

    def _drain(self, claims: list[tuple[Rank, Key]]) -> None:
        """Mark one slot for each claim as draining: slots that drain already, then slots with few requests."""
        self._first = claims[0][0] if claims else None
        slots: list[_Slot] = []
        for slot in self._slots:
            if slot.key in self._pins:
                slot.is_draining = False  # it may have drained before it was pinned
            elif slot.is_ready:
                slots.append(slot)
        if claims:
            slots.sort(key=lambda slot: (not slot.is_draining, len(slot.running), slot.last_used))
        for index, slot in enumerate(slots):
            slot.is_draining = index < len(claims)

    def _release(self) -> list[int]:
        """Release waiting requests whose adapter is ready and accepts them. Return their uids."""
        released: list[int] = []
        for key in self.load_queue.keys:
            slot = self._by_key.get(key)
            while slot is not None and slot.is_ready and (waiter := self.load_queue.first(key)) is not None:
                if not self._takes(slot, slot.num_served + len(slot.released), waiter):
                    break
                self.load_queue.remove(waiter.uid)
                slot.released[waiter.uid] = waiter
                self._keys[waiter.uid] = key
                released.append(waiter.uid)
        return released

    def _free_slot(self, rank: Rank) -> _Slot | None:
        """Return a slot without running requests, and without released requests of a lower rank than ``rank``."""
        free = [
            slot
            for slot in self._slots
            if (slot.is_ready or slot.key is None)
            and not slot.running
            and slot.key not in self._pins
            and all(self.load_queue.rank(waiter) > rank for waiter in slot.released.values())
        ]
        return min(free, key=lambda slot: (slot.key is not None, slot.last_used), default=None)

    def _replace(self, slot: _Slot, key: Key) -> None:
        """Put another adapter into a slot. Released requests of the old adapter will wait again."""
        if slot.key is not None:
            del self._by_key[slot.key]
        for uid in slot.released:
            del self._keys[uid]
        slot.assign(key)
        self._by_key[key] = slot
        slot.last_used = self._num_uses = self._num_uses + 1
