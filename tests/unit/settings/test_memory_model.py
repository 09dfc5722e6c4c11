"""How KV pages, recurrent states and snapshots share the memory of the pool."""

from __future__ import annotations

from msgspec.structs import replace

from aioengine.settings.memory_model import KVCache, PoolDemand, PoolFit, format_bytes
from aioengine.settings.page_groups import PageGroups

GIB = 1 << 30
DEMAND = PoolDemand(
    num_tokens=None,
    groups=PageGroups(windows=(None,), page_size=16),
    page_bytes=16 * 1024,
    context_length=2048,
    max_running=1 << 20,
)
STATES = PoolDemand(
    num_tokens=None,
    groups=PageGroups(windows=(None,), page_size=4),
    page_bytes=4,
    context_length=8,
    max_running=50,
    state_bytes=100,
)


def test_default_pool_uses_all_memory() -> None:
    assert DEMAND.fit(GIB).num_pages == GIB // (16 * 1024)


def test_default_pool_is_not_larger_than_all_requests() -> None:
    assert replace(DEMAND, max_running=2).fit(GIB).num_pages == 2 * 128


def test_requested_pool_fits_or_has_no_pages() -> None:
    requested = replace(DEMAND, num_tokens=48)
    assert requested.fit(3 * 16 * 1024).num_pages == 3
    assert requested.fit(3 * 16 * 1024 - 1).num_pages == 0


def test_states_use_at_most_half_of_the_memory() -> None:
    assert STATES.fit(2000) == PoolFit(num_rows=9, num_snapshots=0, left=1000, num_pages=100)
    assert replace(STATES, max_running=3).fit(2000).num_rows == 3
    assert replace(STATES, state_bytes=600).fit(2000).num_rows == 0


def test_states_leave_a_pool_of_the_requested_size() -> None:
    assert replace(STATES, num_tokens=2000).fit(3000).num_rows == 9


def test_snapshots_use_at_most_a_quarter_of_the_rest() -> None:
    assert replace(STATES, has_snapshots=True).fit(4000) == PoolFit(19, 5, 1500, 100)
    assert replace(STATES, has_snapshots=True, state_bytes=10, max_running=1).fit(2000).num_snapshots == 16
    assert replace(STATES, has_snapshots=True, state_bytes=600).fit(2000).num_snapshots == 0


def test_snapshots_leave_the_pages_of_one_context() -> None:
    long = replace(STATES, has_snapshots=True, page_bytes=40, context_length=180)
    assert long.fit(4000).num_snapshots == 2
    requested = replace(STATES, has_snapshots=True, page_bytes=40, num_tokens=280, max_running=10)
    assert requested.fit(4000).num_snapshots == 1


def test_pages_of_layers_with_windows_hold_one_group_of_layers() -> None:
    cache = KVCache(num_layers=4, layer_elements=10, head_size=5, windows=(None, 20, 20, 20))
    assert cache.pages() == (10, (None, 20, 20, 20))
    assert replace(cache, windows=()).pages() == (40, (None,))


def test_formatted_bytes() -> None:
    sizes = (3 << 20, GIB + GIB // 2, 12 << 10)
    assert list(map(format_bytes, sizes)) == ["3.0 MiB", "1.5 GiB", "12.0 KiB"]
