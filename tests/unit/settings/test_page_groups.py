"""The arithmetic of pages in groups."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aioengine.settings.page_groups import PageGroups, layer_groups

GROUPS = st.builds(
    lambda windows, page_size, min_tokens: PageGroups(
        windows=tuple(windows), page_size=page_size, min_tokens=min_tokens
    ),
    st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=1, max_size=4),
    st.sampled_from([1, 2, 5, 16]),
    st.sampled_from([1, 1, 7]),
)


def test_groups_have_as_many_layers_as_the_group_of_the_largest_window() -> None:
    assert layer_groups((5, 5, None, 5, 5, None)) == (((2, 5), (0, 1), (3, 4)), (None, 5, 5))
    assert layer_groups((3, 9)) == (((1,), (0,)), (9, 3))
    assert layer_groups((None, None)) == (((0, 1),), ())
    assert layer_groups(()) == ((), ())


def test_layers_share_one_page_table_if_groups_would_waste_memory() -> None:
    assert layer_groups((None, None, None, None, 5)) == (((0, 1, 2, 3), (4,)), ())


def test_requests_need_pages_for_all_tokens_without_windows() -> None:
    groups = PageGroups(windows=(None,), page_size=16)
    assert [groups.pages_for(count) for count in (0, 1, 16, 17, 1000)] == [0, 1, 1, 2, 63]
    assert groups.tokens_in(100, 500) == 1600
    assert groups.pages_in(1601, 500) == 101


def test_windows_limit_the_pages_of_a_request() -> None:
    groups = PageGroups(windows=(None, 1024, 1024), page_size=16)
    assert groups.pages_for(512) == 3 * 32
    assert groups.pages_for(131_072) == 8192 + 2 * (1024 // 16 + 2)
    assert PageGroups(windows=(1024,), page_size=16).pages_for(1 << 40) == 1024 // 16 + 2


@given(groups=GROUPS, context_length=st.integers(1, 200), num_pages=st.integers(0, 400))
def test_tokens_in_is_the_inverse_of_pages_in(groups: PageGroups, context_length: int, num_pages: int) -> None:
    tokens = groups.tokens_in(num_pages, context_length)
    needed = groups.pages_in(tokens, context_length)
    assert needed <= num_pages
    assert groups.tokens_in(needed, context_length) == tokens
    assert (tokens >= context_length) == (num_pages >= groups.pages_for(context_length))


@given(groups=GROUPS, length=st.integers(1, 120), chunk=st.integers(1, 9))
def test_request_completes_with_the_pages_for_its_length(groups: PageGroups, length: int, chunk: int) -> None:
    """It computes at most ``min_tokens`` per step, and keeps the pages of tokens that it may compute again."""
    chunk = min(chunk, groups.min_tokens)
    computed, room, firsts, most = 0, 0, [0] * groups.num_groups, 0
    while computed < length:
        end = min(length, computed + chunk)
        room = max(room, -(-end // groups.page_size))
        most = max(most, sum(room - first for first in firsts))
        has_new_page = end // groups.page_size > computed // groups.page_size
        computed = end
        if has_new_page:
            firsts = [groups.first_seen(group, computed - 1) for group in range(groups.num_groups)]
    assert most <= groups.pages_for(length)
