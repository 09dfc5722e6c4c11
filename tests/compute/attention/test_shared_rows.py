"""Prompts of a step with the same first pages: the search for such rows, and the merge of attention results."""

from __future__ import annotations

import numpy as np
import pytest

from aioengine.attention import _shared_rows
from aioengine.attention._shared_rows import SharedRows, find_shared
from tests.compute.interpreted import run_interpreted

PAGE_SIZE = 4
ALONE = [[100 + 10 * row + page for page in range(6)] for row in range(3)]


def search(tables: list[list[int]], lengths: list[tuple[int, int]]) -> SharedRows | None:
    """lengths: (earlier positions, new positions) of each row."""
    queries = np.array([count for _, count in lengths], dtype=np.int32)
    ends = np.array([start + count for start, count in lengths], dtype=np.int32)
    return find_shared(np.array(tables, dtype=np.int32), queries, ends, PAGE_SIZE)


@pytest.fixture
def any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shared_rows, "MIN_PAIRS", 1)


@pytest.mark.usefixtures("any_number")
def test_adjacent_rows_with_the_same_pages_share_them() -> None:
    shared = [[1, 2, 3, 20 + row, 30 + row, 0] for row in range(5)]
    lengths = [(8, 3), *[(12, 5)] * 5, (4, 1), (20, 2)]
    assert search([ALONE[0], *shared, *ALONE[1:]], lengths) == SharedRows(1, 6, 3)


@pytest.mark.usefixtures("any_number")
def test_only_pages_of_earlier_steps_are_shared() -> None:
    tables = [[1, 2, 3, 4, 20 + row] for row in range(4)]
    assert search(tables, [(16, 4), (16, 4), (11, 5), (16, 4)]) == SharedRows(0, 4, 2)
    assert search(tables, [(16, 4), (16, 4), (3, 5), (16, 4)]) is None


@pytest.mark.usefixtures("any_number")
def test_rows_with_the_largest_shared_prefix_are_chosen() -> None:
    short = [[1, 20 + row, 0, 0] for row in range(6)]
    long = [[2, 3, 4, 30 + row] for row in range(4)]
    assert search([*short, *long], [(4, 1)] * 6 + [(12, 3)] * 4) == SharedRows(6, 10, 3)
    assert search([*short, *long], [(4, 9)] * 6 + [(12, 3)] * 4) == SharedRows(0, 6, 1)


@pytest.mark.usefixtures("any_number")
def test_few_rows_or_few_pairs_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [[1, 2, 3, 20 + row] for row in range(3)]
    assert search(tables, [(12, 4)] * 3) is None
    monkeypatch.setattr(_shared_rows, "MIN_PAIRS", 4 * 12 * 4 + 1)
    assert search([*tables, [1, 2, 3, 9]], [(12, 4)] * 4) is None


@pytest.mark.usefixtures("any_number")
def test_shared_positions_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shared_rows, "MAX_POSITIONS", 9)
    assert search([[1, 2, 3, 20 + row] for row in range(4)], [(12, 4)] * 4) == SharedRows(0, 4, 2)


PROGRAM = """
import torch

from aioengine.kernels.triton.scores import add_sinks, merge

torch.manual_seed(0)
scores, values = torch.randn(3, 5, 40), torch.randn(3, 5, 40, 24)  # tokens, heads, positions


def attended(part):
    weights = scores[..., part].softmax(-1)
    return (weights[..., None] * values[..., part, :]).sum(-2), scores[..., part].logsumexp(-1) / 0.6931471805599453


out, weights = attended(slice(0, 9))
merge(out, weights, *attended(slice(9, 40)))
torch.testing.assert_close(out, attended(slice(0, 40))[0])

out, weights = attended(slice(0, 40))
sinks = torch.randn(5) * 3
add_sinks(out, weights, sinks)
total = torch.cat((scores, sinks.view(1, 5, 1).expand(3, 5, 1)), -1).softmax(-1)[..., :40]
torch.testing.assert_close(out, (total[..., None] * values).sum(-2))
"""


@pytest.mark.slow
def test_kernels_merge_two_parts_and_add_sinks() -> None:
    run_interpreted(PROGRAM)
