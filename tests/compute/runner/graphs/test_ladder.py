"""The row counts of the graphs."""

from __future__ import annotations

import itertools

import pytest

from aioengine.runner.graphs.ladder import cascade_ladder, ladder, longest_piece, piece_ladder


@pytest.mark.parametrize("max_rows", [1, 2, 3, 16, 100, 256, 300, 1024])
def test_ladder(max_rows: int) -> None:
    sizes = ladder(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    assert all(after - before <= max(4, before // 2) for before, after in itertools.pairwise(sizes))
    assert all(after - before <= 16 for before, after in itertools.pairwise(sizes) if after <= 256)


def test_no_graphs() -> None:
    assert ladder(0) == []


@pytest.mark.parametrize("max_rows", [48, 50, 64, 100, 256, 1024, 2000])
def test_ladder_of_rows_that_share_pages(max_rows: int) -> None:
    sizes = cascade_ladder(max_rows, min_rows=48)
    assert sizes == sorted(set(sizes))
    assert sizes[0] >= 48
    assert sizes[-1] == max_rows


def test_too_few_rows_to_share_pages() -> None:
    assert cascade_ladder(47, min_rows=48) == []
    assert cascade_ladder(0, min_rows=48) == []


@pytest.mark.parametrize("max_tokens", [0, 20, 32, 500, 622, 1024, 1100, 8192])
def test_ladder_of_steps_in_pieces(max_tokens: int) -> None:
    sizes = piece_ladder(max_tokens)
    assert sizes == sorted(set(sizes))
    assert sizes[-1:] == ([max_tokens] if max_tokens else [])
    assert all(after - before <= max(64, min(before // 2, 256)) for before, after in itertools.pairwise(sizes))


def test_graphs_of_prompts_end_where_the_device_is_the_slower() -> None:
    assert longest_piece(600_000_000, 8192) > 2048
    assert 512 <= longest_piece(8_000_000_000, 8192) < 1024
    assert longest_piece(4_000_000, 512) == 512
    assert longest_piece(4_000_000, 131_072) == 8192, "a start is not to take minutes"
