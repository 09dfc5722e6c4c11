"""Checks that all pages, snapshots and adapter slots are accounted for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.memory.windowed_cache import RELEASED, WindowedAllocation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aioengine.memory.adapter_slots import AdapterSlots
    from aioengine.memory.prefix_cache import Allocation, PrefixCache
    from aioengine.memory.snapshots import RequestSnapshots, Snapshots
    from aioengine.scheduler.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Check the cache and the slots of adapters of a scheduler."""
    check_cache(scheduler.cache, (request.allocation for request in scheduler.requests.running))
    check_slots(scheduler.requests.adapters)


def check_cache(cache: PrefixCache, running: Iterable[Allocation]) -> None:
    """Check that each page and snapshot id is accounted for. running: allocations of all running requests."""
    allocations = list(running)
    assert len(cache._free) + cache.num_cached + sum(map(num_owned, allocations)) == cache.num_pages
    if cache.snapshots is not None:
        _check_snapshots(
            cache.snapshots, [allocation.snapshots for allocation in allocations if allocation.snapshots is not None]
        )


def num_owned(allocation: Allocation) -> int:
    """Return the number of pages that belong to this request only and are in no node of the tree."""
    if isinstance(allocation, WindowedAllocation):
        pages = zip(allocation.nodes, allocation.pages, strict=True)
        return sum(node is None and page != RELEASED for node, page in pages)
    cached = sum(node.page == page for node, page in zip(allocation.path, allocation.pages, strict=False))
    return len(allocation.pages) - cached


def _check_snapshots(snapshots: Snapshots, running: Sequence[RequestSnapshots]) -> None:
    """Check that every snapshot is free, stored or being copied. running: snapshots of all running requests."""
    copies = [copy.snapshot_id for request in running for copy in request.copies]
    assert sorted([*snapshots._free, *snapshots._ids.values(), *copies]) == list(range(snapshots.num_snapshots))
    assert all(node.parent is not None and not node.is_pending for node in snapshots._ids)
    produced = {id(boundary.node) for request in running for boundary in request.produces}
    assert produced == {id(node) for node in snapshots._producers}


def check_slots(slots: AdapterSlots) -> None:
    """Check that the slots of adapters and their indexes agree."""
    assert {uid: slot.key for slot in slots._slots for uid in (*slot.running, *slot.released)} == slots._keys
    assert {slot.key: slot for slot in slots._slots if slot.key is not None} == slots._by_key
    assert all(slot.is_ready or not slot.running for slot in slots._slots)
