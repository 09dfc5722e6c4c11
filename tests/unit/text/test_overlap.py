"""Chunks are cut and joined by offset."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.text.overlap import UnreadChunk, trim_to_new


def test_trim_to_new() -> None:
    assert trim_to_new("haha", 0, 2) == "ha"
    assert trim_to_new("ha", 2, 2) == "ha"  # repeated text is no overlap
    assert trim_to_new("ha", 0, 5) == ""
    assert trim_to_new([1, 0, 0], 3, 4) == [0, 0]


def test_a_gap_is_an_error() -> None:
    with pytest.raises(ValueError, match="a chunk starts at 7, but only 5 came before it: 2 are missing"):
        trim_to_new("x", 7, 5)
    chunk = UnreadChunk()
    chunk.add("ab", 0, [1], 0)
    with pytest.raises(ValueError, match="missing"):
        chunk.add("c", 2, [3], 2)
    assert (chunk.text, chunk.token_ids) == ("ab", [1])


@given(
    text=st.text(alphabet="ha", max_size=20),
    spans=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8),
    reads=st.sets(st.integers(0, 8)),
)
def test_overlapping_chunks_joined_are_the_text(text: str, spans: list[tuple[int, int]], reads: set[int]) -> None:
    ids = list(range(len(text)))
    unread = UnreadChunk()
    out, out_ids, given_out = "", list[int](), 0
    for place, (start, end) in enumerate([*spans, (0, len(text))]):
        start = min(start, given_out)  # a resumed stream may start again anywhere before
        end = min(max(start, end), len(text))
        unread.add(text[start:end], start, ids[start:end], start)
        given_out = max(given_out, end)
        if place in reads:
            assert (unread.text_offset, unread.token_offset) == (len(out), len(out_ids))
            out, out_ids = out + unread.text, out_ids + unread.token_ids
            unread = unread.following()
    assert out + unread.text == text
    assert out_ids + unread.token_ids == ids
