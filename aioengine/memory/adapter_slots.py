"""AdapterSlots: which LoRA adapter is in which slot of the device, and which requests may use it.

A request uses the slot of its adapter from its admission until it ends or loses its pages. Until then it may wait in
line: its adapter is in no slot, is being copied, or shall give its slot to another one. When that is over it is
*released*: it returns to the queue, and its adapter stays while it is about to be admitted.

The line has one order, the rank: the tenant that was given least goes first, then the place in the queue. An adapter
that waits gets the next slot without running requests, the least recently used first; the one whose first request ranks
highest gets it first. Where every slot is in use, as many slots as adapters wait are *draining*: once such an adapter
has served ``quantum`` requests since it was placed, it takes only requests that rank before those of the adapters that
wait. So the slot becomes free however many requests come, and a slot is not given away for a single request while
there are many.

An adapter with a pin keeps its slot, and is placed although no request asks for it. At least one slot has to remain for
the others. Slots are held by running requests alone, and these never wait for a slot: nothing can block.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

Key = tuple[str, ...]
"""What an adapter is found by; two names of the same files may have one key."""

Rank = tuple[float, ...]
PINNED: Rank = (-math.inf,)


class Waiter(NamedTuple):
    """A request that needs an adapter. ``order``: its place in the queue, unique; smaller is sooner."""

    uid: int
    tenant: str
    order: tuple[float, ...]


class Assignment(NamedTuple):
    """An adapter to be copied into a slot."""

    slot: int
    key: Key


class _Slot:
    """One slot.

    key: its adapter; None: none. is_ready: it was copied. running: uids. released: requests that waited for it, and
    are not admitted yet. num_served: admissions since it was placed. last_used: counts uses of all slots.
    """

    __slots__ = ("is_draining", "is_ready", "key", "last_used", "num_served", "number", "released", "running")

    def __init__(self, number: int) -> None:
        self.number = number
        self.last_used = 0
        self.running: set[int] = set()
        self.released: dict[int, Waiter] = {}
        self.assign(None)

    def assign(self, key: Key | None) -> None:
        """Give it to another adapter, or to none."""
        self.key = key
        self.is_ready = False
        self.is_draining = False
        self.num_served = 0
        self.released.clear()


class Line:
    """The requests that wait for adapters.

    ``turn``: how much a tenant was given already; the least goes first.
    """

    __slots__ = ("_by_key", "_turn", "_waiters")

    def __init__(self, turn: Callable[[str], float]) -> None:
        self._turn = turn
        self._waiters: dict[int, tuple[Key, Waiter]] = {}
        self._by_key: dict[Key, dict[str, list[tuple[tuple[float, ...], int]]]] = {}  # by adapter and tenant, in order

    @property
    def keys(self) -> list[Key]:
        """The adapters that requests wait for."""
        return list(self._by_key)

    def rank(self, waiter: Waiter) -> Rank:
        """The place of a request among all that wait; smaller is sooner."""
        return (self._turn(waiter.tenant), *waiter.order)

    def uids(self, key: Key) -> list[int]:
        """The requests that wait for an adapter, also those that wait while it drains."""
        return [uid for of_tenant in self._by_key.get(key, {}).values() for _, uid in of_tenant]

    def first(self, key: Key) -> Waiter | None:
        """The next one for an adapter."""
        tenants = self._by_key.get(key, {})
        heads = [of_tenant[0][1] for of_tenant in tenants.values()]
        if len(heads) == 1:
            return self._waiters[heads[0]][1]
        return min((self._waiters[uid][1] for uid in heads), key=self.rank, default=None)

    def add(self, key: Key, waiter: Waiter) -> None:
        self._waiters[waiter.uid] = key, waiter
        insort(self._by_key.setdefault(key, {}).setdefault(waiter.tenant, []), (waiter.order, waiter.uid))

    def remove(self, uid: int) -> bool:
        """Whether it was in line."""
        found = self._waiters.pop(uid, None)
        if found is None:
            return False
        key, waiter = found
        tenants = self._by_key[key]
        of_tenant = tenants[waiter.tenant]
        del of_tenant[bisect_left(of_tenant, (waiter.order, uid))]
        if not of_tenant:
            del tenants[waiter.tenant]
        if not tenants:
            del self._by_key[key]
        return True


class AdapterSlots:
    """The slots, numbered from 1, and the line. Pure bookkeeping: what is copied, and when, is decided elsewhere.

    Attributes:
        line: the requests that wait. is_changed: ``assign`` may have something to do.
    """

    __slots__ = ("_by_key", "_first", "_keys", "_num_uses", "_pins", "_quantum", "_slots", "is_changed", "line")

    def __init__(self, num_slots: int, *, quantum: int, turn: Callable[[str], float] = lambda _: 0.0) -> None:
        """``turn``: as in ``Line``."""
        self._slots = [_Slot(number) for number in range(1, num_slots + 1)]
        self._quantum = max(1, quantum)
        self._by_key: dict[Key, _Slot] = {}
        self._keys: dict[int, Key] = {}  # uid -> the adapter that it uses, or is released for
        self._pins: dict[Key, set[int]] = {}
        self._first: Rank | None = None  # of the adapters that wait and could be placed
        self._num_uses = 0
        self.line = Line(turn)
        self.is_changed = False

    # ------------------------------------------------------------ requests

    def may_use(self, key: Key, waiter: Waiter) -> bool:
        """Whether the request could be admitted now, as far as its adapter is concerned."""
        slot = self._by_key.get(key)
        return slot is not None and slot.is_ready and self._takes(slot, slot.num_served, waiter)

    def use(self, key: Key, waiter: Waiter) -> int:
        """The request is admitted, which ``may_use`` has allowed; returns its slot, until ``leave``."""
        slot = self._by_key[key]
        slot.released.pop(waiter.uid, None)
        slot.running.add(waiter.uid)
        slot.num_served += 1
        slot.last_used = self._num_uses = self._num_uses + 1
        self._keys[waiter.uid] = key
        return slot.number

    def wait(self, key: Key, waiter: Waiter) -> None:
        """The request stands in line until it is released, or leaves."""
        self.leave(waiter.uid)
        self.line.add(key, waiter)
        self.is_changed = True

    def leave(self, uid: int) -> None:
        """The request needs its adapter no more, for now; one that is not known is ignored."""
        if (key := self._keys.pop(uid, None)) is not None:
            slot = self._by_key[key]
            slot.running.discard(uid)
            slot.released.pop(uid, None)
            if not slot.running:  # else the slot becomes no freer
                self.is_changed = self.is_changed or bool(self.line.keys or self._pins)
        elif self.line.remove(uid):
            self.is_changed = True

    def slot_of(self, uid: int) -> int:
        """The slot that a running request uses."""
        return self._by_key[self._keys[uid]].number

    # ------------------------------------------------------------ adapters

    @property
    def num_placed(self) -> int:
        """Adapters that are in slots."""
        return sum(slot.is_ready for slot in self._by_key.values())

    def claims(self) -> list[tuple[Rank, Key]]:
        """The adapters that are needed and in no slot, the next first, with the ranks of their first requests."""
        missing = [key for key in self.line.keys if key not in self._by_key and key not in self._pins]
        found = [(PINNED, key) for key in self._pins if key not in self._by_key]
        found += [(self.line.rank(first), key) for key in missing if (first := self.line.first(key)) is not None]
        found.sort(key=itemgetter(0))
        return found

    def assign(self, claims: list[tuple[Rank, Key]]) -> tuple[list[Assignment], list[int]]:
        """Give slots to adapters that wait for one, and release requests whose adapters are ready.

        claims: those of ``claims`` that can be placed at once; the others hold no slot up.
        Returns what is to be copied, each followed by ``placed`` or ``fail``, and the uids of the released requests.
        """
        self.is_changed = False
        self._drain(claims)
        released = self._release()
        assignments: list[Assignment] = []
        for rank, key in claims:
            slot = self._free_slot(rank)
            if slot is None:
                break
            self._give(slot, key)
            assignments.append(Assignment(slot.number, key))
        if assignments:
            self._drain(claims[len(assignments) :])
            released += self._release()
        return assignments, released

    def placed(self, key: Key) -> None:
        """An adapter was copied into its slot."""
        self._by_key[key].is_ready = True
        self.is_changed = True

    def fail(self, key: Key) -> None:
        """An adapter could not be copied: its slot is empty. Requests in line for it go on waiting."""
        self._by_key.pop(key).assign(None)
        self.is_changed = True

    def has(self, key: Key) -> bool:
        """Whether an adapter is in a slot, and ready."""
        slot = self._by_key.get(key)
        return slot is not None and slot.is_ready

    def pin(self, key: Key, adapter: int) -> None:
        """Place an adapter, also without a request, and keep it there until ``unpin`` with the same number."""
        self._pins.setdefault(key, set()).add(adapter)
        self.is_changed = True

    def unpin(self, key: Key, adapter: int) -> None:
        """Undo a pin; an unknown one is ignored."""
        pins = self._pins.get(key, set())
        pins.discard(adapter)
        if not pins:
            self._pins.pop(key, None)
        self.is_changed = True

    def drop(self, key: Key) -> None:
        """An adapter will not be asked for again: its slot is empty, unless it is pinned or in use."""
        slot = self._by_key.get(key)
        if slot is not None and slot.is_ready and not (slot.running or slot.released or key in self._pins):
            del self._by_key[key]
            slot.assign(None)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless the slots and their indexes agree."""
        users = {uid: slot.key for slot in self._slots for uid in (*slot.running, *slot.released)}
        by_key = {slot.key: slot for slot in self._slots if slot.key is not None}
        if users != self._keys or by_key != self._by_key:
            raise RuntimeError(f"users {users} and slots {list(by_key)} do not fit their indexes")
        if any(slot.running and not slot.is_ready for slot in self._slots):
            raise RuntimeError("a slot that is not ready has running requests")

    # ------------------------------------------------------------ inside

    def _takes(self, slot: _Slot, num_served: int, waiter: Waiter) -> bool:
        if not slot.is_draining or num_served < self._quantum or self._first is None:
            return True
        return self.line.rank(waiter) < self._first

    def _drain(self, claims: list[tuple[Rank, Key]]) -> None:
        """As many slots as adapters wait shall become free: those that do already, or have the fewest requests."""
        self._first = claims[0][0] if claims else None
        slots: list[_Slot] = []
        for slot in self._slots:
            if slot.key in self._pins:
                slot.is_draining = False  # it was, before it was pinned
            elif slot.is_ready:
                slots.append(slot)
        if claims:
            slots.sort(key=lambda slot: (not slot.is_draining, len(slot.running), slot.last_used))
        for place, slot in enumerate(slots):
            slot.is_draining = place < len(claims)

    def _release(self) -> list[int]:
        """Release those in line whose adapter is ready and takes them."""
        released: list[int] = []
        for key in self.line.keys:
            slot = self._by_key.get(key)
            while slot is not None and slot.is_ready and (waiter := self.line.first(key)) is not None:
                if not self._takes(slot, slot.num_served + len(slot.released), waiter):
                    break
                self.line.remove(waiter.uid)
                slot.released[waiter.uid] = waiter
                self._keys[waiter.uid] = key
                released.append(waiter.uid)
        return released

    def _free_slot(self, rank: Rank) -> _Slot | None:
        """The slot for an adapter of this rank: without running requests, and without released ones before it."""
        free = [
            slot
            for slot in self._slots
            if (slot.is_ready or slot.key is None)
            and not slot.running
            and slot.key not in self._pins
            and all(self.line.rank(waiter) > rank for waiter in slot.released.values())
        ]
        return min(free, key=lambda slot: (slot.key is not None, slot.last_used), default=None)

    def _give(self, slot: _Slot, key: Key) -> None:
        """Requests that were released for the adapter before are in the queue, and will stand in line again."""
        if slot.key is not None:
            del self._by_key[slot.key]
        for uid in slot.released:
            del self._keys[uid]
        slot.assign(key)
        self._by_key[key] = slot
        slot.last_used = self._num_uses = self._num_uses + 1
