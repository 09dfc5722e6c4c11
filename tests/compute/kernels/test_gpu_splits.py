"""The positions of decode rows are divided into splits, longest first."""

from __future__ import annotations

import numpy as np
import pytest

from aioengine.attention._gpu_splits import MAX_SPLITS, STEP, max_splits, plan_splits

ROWS = {
    "one short": [1],
    "one long": [40_000],
    "equal": [576] * 256,
    "one among many": [30_000] + [20] * 300,
    "all lengths": list(range(1, 700)),
    "at borders": [STEP - 1, STEP, STEP + 1, 2 * STEP, MAX_SPLITS * STEP, MAX_SPLITS * STEP + 1],
}


@pytest.mark.parametrize("num_kv_heads", [1, 8, 32])
@pytest.mark.parametrize("window", [None, 1, 300])
@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
def test_every_position_is_in_one_split(lengths: list[int], window: int | None, num_kv_heads: int) -> None:
    num_splits = max_splits(len(lengths), num_kv_heads)
    assert num_splits % 16 == 0
    splits = plan_splits(np.array(lengths, dtype=np.int32), num_splits, window)
    assert splits.shape == (5, num_splits)
    used = splits[:, splits[0] >= 0]
    assert (splits[0, used.shape[1] :] == -1).all(), "unused entries come last"
    for row, length in enumerate(lengths):
        own = used[:, used[0] == row]
        begins, ends, counts, firsts = own[1:].tolist()
        first = max(length - (window or length), 0)
        assert [first, *ends] == [*begins, length], "a split starts at the end of the previous split"
        assert all((begin - first) % STEP == 0 for begin in begins)
        assert set(counts) == {len(begins)}
        assert len(begins) <= MAX_SPLITS
        assert splits[0, firsts[0] : firsts[0] + counts[0]].tolist() == [row] * counts[0]
        assert set(firsts) == {firsts[0]}
    steps = -(-(used[2] - used[1]) // STEP)
    assert steps[0] == steps.max()


def test_few_rows_have_many_splits_and_many_rows_have_one_split_each() -> None:
    assert (plan_splits(np.array([8192], dtype=np.int32), max_splits(1, 8))[0] >= 0).sum() > MAX_SPLITS // 2
    assert (plan_splits(np.full(256, 300, dtype=np.int32), max_splits(256, 8))[0] >= 0).sum() == 256
