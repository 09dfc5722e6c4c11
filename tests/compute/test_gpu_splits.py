"""The positions of rows that decode are shared out: each once, in few enough parts, the longest first."""

from __future__ import annotations

import numpy as np
import pytest

from aioengine.attention._gpu_splits import MAX_PARTS, STEP, num_places, share_out

ROWS = {
    "one short": [1],
    "one long": [40_000],
    "equal": [576] * 256,
    "one among many": [30_000] + [20] * 300,
    "all lengths": list(range(1, 700)),
    "at borders": [STEP - 1, STEP, STEP + 1, 2 * STEP, MAX_PARTS * STEP, MAX_PARTS * STEP + 1],
}


@pytest.mark.parametrize("num_kv_heads", [1, 8, 32])
@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
def test_every_position_is_in_one_part(lengths: list[int], num_kv_heads: int) -> None:
    places = num_places(len(lengths), num_kv_heads)
    assert places % 16 == 0
    parts = share_out(np.array(lengths, dtype=np.int32), places)
    assert parts.shape == (5, places)
    used = parts[:, parts[0] >= 0]
    assert (parts[0, used.shape[1] :] == -1).all(), "the places without a part stand behind the others"
    for row, length in enumerate(lengths):
        own = used[:, used[0] == row]
        begins, ends, counts, firsts = own[1:].tolist()
        assert [0, *ends] == [*begins, length], "one part begins where the one before ends"
        assert all(begin % STEP == 0 for begin in begins)
        assert set(counts) == {len(begins)}
        assert len(begins) <= MAX_PARTS
        assert parts[0, firsts[0] : firsts[0] + counts[0]].tolist() == [row] * counts[0]
        assert set(firsts) == {firsts[0]}
    steps = -(-(used[2] - used[1]) // STEP)
    assert steps[0] == steps.max()


def test_few_rows_give_many_parts_and_many_rows_whole_ones() -> None:
    assert (share_out(np.array([8192], dtype=np.int32), num_places(1, 8))[0] >= 0).sum() > MAX_PARTS // 2
    assert (share_out(np.full(256, 300, dtype=np.int32), num_places(256, 8))[0] >= 0).sum() == 256
