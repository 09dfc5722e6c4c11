from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.utils import trim_overlap


@pytest.mark.parametrize(
    ("existing", "new", "rest"),
    [
        ("", "abc", "abc"),
        ("abc", "", ""),
        ("abc", "def", "def"),
        ("abc", "cde", "de"),
        ("hello wor", "world", "ld"),
        ("abc", "abc", ""),
        ("aaa", "aaaa", "a"),
        ("abcd", "bc", "bc"),
    ],
)
def test_trim_overlap_removes_the_repeated_part(existing: str, new: str, rest: str) -> None:
    assert trim_overlap(existing, new) == rest


@given(st.text("ab", max_size=8), st.text("ab", max_size=8))
def test_trim_overlap_joins_to_the_shortest_text_that_contains_both(existing: str, new: str) -> None:
    joined = existing + trim_overlap(existing, new)
    assert joined.startswith(existing)
    assert joined.endswith(new)
    assert not any(
        len(shorter) < len(joined) and shorter.startswith(existing)
        for shorter in (existing + new[length:] for length in range(len(new) + 1) if existing.endswith(new[:length]))
    )
