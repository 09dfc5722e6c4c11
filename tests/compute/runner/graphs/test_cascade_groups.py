"""Groups of rows that share pages, the order of rows, and the merge of attention over two parts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from aioengine.attention._base import AttentionShape, CascadeLimits, kv_pool_shape
from aioengine.attention.torch import TorchAttention
from aioengine.protocol.messages import Sampling
from aioengine.runner.graphs.shared_prefixes import CascadeGroup, SharedPrefixes, find_groups
from aioengine.runner.inputs import InputBuilder
from aioengine.runner.page_tables import PageTables
from aioengine.runner.rows import RowTable
from aioengine.scheduler.plan import TOKENS, NewRow, Row
from tests.compute.stepping import make_batch, write_and_attend

WORTH = CascadeLimits(min_rows=2, min_saved=3, max_groups=4)


def groups(
    tables: list[list[int]], limits: CascadeLimits = WORTH, *, num_full: list[int] | None = None
) -> list[CascadeGroup]:
    width = max(map(len, tables))
    pages = np.array([table + [0] * (width - len(table)) for table in tables], dtype=np.int32)
    full = [len(table) for table in tables] if num_full is None else num_full
    return find_groups(pages, np.array(full), limits)


def shown(cascade_groups: list[CascadeGroup]) -> list[tuple[list[int], int]]:
    return [(sorted(group.rows.tolist()), group.num_pages) for group in cascade_groups]


def test_one_prefix_for_all() -> None:
    tables = [[1, 2, 3, 4 + row] for row in range(5)]
    assert shown(groups(tables)) == [([0, 1, 2, 3, 4], 3)]


def test_rows_without_common_pages_have_no_group() -> None:
    assert groups([[1, 2, 3], [4, 5, 6], [7, 8, 9]]) == []
    assert groups([[1, 9], [1, 8]]) == []  # saving one page is not enough
    assert groups([[1, 2, 3, 4]]) == []
    assert groups([[1, 2], [3, 4]], CascadeLimits(min_rows=2, min_saved=0, max_groups=4)) == []
    assert find_groups(np.zeros((0, 0), dtype=np.int32), np.zeros(0, dtype=np.int64), WORTH) == []


def test_two_prefixes_and_a_single_row() -> None:
    tables = [[1, 2, 3, 10], [5, 6, 7, 11], [1, 2, 3, 12], [8, 13, 14, 15], [5, 6, 7, 16], [1, 2, 3, 17]]
    assert shown(groups(tables)) == [([0, 2, 5], 3), ([1, 4], 3)]


def test_long_prefixes_of_groups_beat_a_short_common_prefix() -> None:
    """All rows begin with page 1, but each half shares more pages."""
    tables = [[1, *range(half, half + 6), row] for half, row in ((100, 50), (200, 51), (100, 52), (200, 53))]
    assert shown(groups(tables)) == [([0, 2], 7), ([1, 3], 7)]
    few = [[1, 2, 3, 4, 10], [1, 2, 3, 4, 11], [1, 2, 3, 12, 13], [1, 2, 3, 14, 15]]
    assert shown(groups(few)) == [([0, 1, 2, 3], 3)]


def test_only_full_pages_are_shared() -> None:
    tables = [[1, 2, 3, 4]] * 3
    assert shown(groups(tables, num_full=[3, 2, 4])) == [([0, 1, 2], 2)]
    assert groups(tables, num_full=[0, 4, 0]) == []


def test_groups_that_save_most_are_chosen() -> None:
    tables = [[10 * number + place for place in range(4 + number)] for number in range(1, 7) for _ in range(2)]
    cascade_groups = groups(tables)
    assert [group.num_pages for group in cascade_groups] == [10, 9, 8, 7]


def test_nested_prefixes_of_many_lengths() -> None:
    tables = [list(range(1, 2 + row)) for row in range(300)]
    cascade_groups = groups(tables, CascadeLimits(min_rows=10, min_saved=50, max_groups=4))
    assert cascade_groups
    check(tables, cascade_groups)


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_a_group_share_its_pages(seed: int) -> None:
    generator = np.random.default_rng(seed)
    stems = [generator.integers(1, 4, 6).tolist() for _ in range(3)]
    tables = [[*stems[generator.integers(3)][: generator.integers(1, 7)], 100 + row] for row in range(30)]
    cascade_groups = groups(tables)
    check(tables, cascade_groups)
    assert [group.num_saved for group in cascade_groups] == sorted(
        (group.num_saved for group in cascade_groups), reverse=True
    )


def check(tables: list[list[int]], cascade_groups: list[CascadeGroup]) -> None:
    seen: set[int] = set()
    for group in cascade_groups:
        rows = group.rows.tolist()
        assert not seen & set(rows)
        seen |= set(rows)
        assert len({tuple(tables[row][: group.num_pages]) for row in rows}) == 1
        assert all(len(tables[row]) >= group.num_pages for row in rows)
        assert group.num_saved >= WORTH.min_saved


def test_rows_of_a_group_are_adjacent() -> None:
    table = RowTable(
        page_tables=PageTables(max_rows=64, max_row_pages=8),
        num_embeddings=100,
        device=torch.device("cpu"),
        processors=(),
        max_rows=64,
    )
    pages = {0: [1, 2, 3, 10], 1: [5, 6, 7, 11], 2: [1, 2, 3, 12], 3: [1, 2, 3, 13], 4: [20, 21, 22, 23]}
    for uid, row in pages.items():
        table.open(NewRow(uid, Sampling(uid), 60, [1] * 60, row))
    inputs = InputBuilder(table, page_size=16, num_embeddings=100)
    rows = inputs.columns_of([Row(uid, 60, 1, TOKENS) for uid in pages])
    prefixes = SharedPrefixes(table, WORTH, page_size=16)
    cascade_groups = prefixes.find(rows)
    assert cascade_groups is not None
    assert cascade_groups.order.tolist() == [0, 2, 3, 1, 4]
    assert cascade_groups.order[cascade_groups.inverse.numpy()].tolist() == [0, 1, 2, 3, 4]
    assert cascade_groups.num_shared.tolist() == [3, 3, 3, 0, 0]
    assert cascade_groups.pages.row_ends.tolist() == [3]
    assert cascade_groups.pages.num_pages.tolist() == [3]
    assert cascade_groups.pages.page_ids.tolist() == [2, 3, 4]  # pages in the pool, after the padding page
    later = inputs.columns_of([Row(uid, 61, 1, TOKENS) for uid in pages])
    assert prefixes.find(later) is cascade_groups, "the search is not repeated for the same rows"
    assert prefixes.find(inputs.columns_of([Row(uid, 61, 1, TOKENS) for uid in (1, 4)])) is None
    table.close(0)
    table.open(NewRow(9, Sampling(9), 60, [1] * 60, [30, 31, 32, 33]))  # in the same row of the table
    changed = prefixes.find(inputs.columns_of([Row(uid, 61, 1, TOKENS) for uid in (9, 1, 2, 3, 4)]))
    assert changed is not None
    assert changed.num_shared.tolist() == [3, 3, 0, 0, 0]


def test_attention_over_two_parts_is_merged_by_their_weights() -> None:
    """The merge of the kernels in torch: outputs are weighted by their sums of exponentials."""
    torch.manual_seed(0)
    num_heads, num_kv_heads, head_size, num_shared = 6, 2, 8, 48
    shape = AttentionShape(
        num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, scale=head_size**-0.5
    )
    pool = torch.randn(kv_pool_shape(shape, num_pages=20, page_size=16))
    tables = [[1, 2, 3, 4 + 2 * row, 5 + 2 * row] for row in range(5)]
    lengths = [49, 60, 64, 77, 80]
    backend = TorchAttention(shape, pool)
    backend.prepare(make_batch([(length - 1, 1) for length in lengths], tables, 16))
    heads = torch.randn(5, num_heads + 2 * num_kv_heads, head_size)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    expected = write_and_attend(backend, q, k, v, 0)
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        keys, values = (part[table].transpose(1, 2).reshape(-1, num_kv_heads, head_size)[:length] for part in pool[0])
        shared = part_of(q[row], keys[:num_shared], values[:num_shared], shape.scale)
        own = part_of(q[row], keys[num_shared:], values[num_shared:], shape.scale)
        higher = torch.maximum(shared[1], own[1])
        weights = [torch.exp2(part[1] - higher) for part in (shared, own)]
        merged = (shared[0] * weights[0] + own[0] * weights[1]) / (weights[0] + weights[1])
        torch.testing.assert_close(merged.flatten(), expected[row], rtol=1e-5, atol=1e-5)


def part_of(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention output [H, E], and the log2 of its sum of exponentials [H, 1]."""
    group = q.shape[0] // keys.shape[1]
    keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
    scores = torch.einsum("he,phe->hp", q, keys) * scale
    weights = torch.logsumexp(scores, -1, keepdim=True) / math.log(2)
    return torch.einsum("hp,phe->he", scores.softmax(-1), values), weights
