"""Drafts are accepted exactly where they equal the sampled tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioengine.runner.sampling.philox import UniformTable, uniforms
from aioengine.runner.sampling.sampler import FAILED
from aioengine.runner.speculation.step_drafts import StepDrafts
from aioengine.runner.speculation.verifier import Verification, Verifier, num_accepted, row_groups

ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), max_size=5),  # drafts
        st.lists(st.sampled_from([0, 0, 0, 1, 1, FAILED]), min_size=6, max_size=6),  # sampled at each position
        st.booleans(),  # one by one
    ),
    min_size=1,
    max_size=6,
)


def verified(drafts: list[int], sampled: list[int]) -> list[int]:
    """Return the tokens of a row by definition. A token that cannot be sampled counts only if it is the first."""
    tokens: list[int] = []
    for index, token_id in enumerate(sampled[: len(drafts) + 1]):
        if token_id == FAILED and tokens:
            break
        tokens.append(token_id)
        if index == len(drafts) or token_id != drafts[index]:
            break
    return tokens


@given(rows=ROWS)
def test_all_rows_get_their_tokens(rows: list[tuple[list[int], list[int], bool]]) -> None:
    verification = Verification([drafts for drafts, _, _ in rows], [one_by_one for _, _, one_by_one in rows])
    verification.active = [*range(len(rows))]
    kept_of: list[list[int]] = [[] for _ in rows]
    while verification.active:
        entries = verification.entries()
        kept = verification.take(entries, [rows[row][1][count] for row, count in entries])
        for row, index in kept.items():
            assert entries[index][0] == row
            kept_of[row].append(entries[index][1])
    for (drafts, sampled, one_by_one), count, final, kept_counts in zip(
        rows, verification.counts, verification.final, kept_of, strict=True
    ):
        assert [*drafts[:count], final] == verified(drafts, sampled)
        at_once = num_accepted(drafts, sampled)
        assert (at_once, sampled[at_once]) == (count, final)
        # each token of a row one by one is kept once, with its logprobs; of other rows only the last one is needed
        assert kept_counts == (list(range(count + 1)) if one_by_one else [count])


def test_a_stopped_row_ends_with_the_accepted_draft() -> None:
    verification = Verification([[4, 5, 6]], [True])
    verification.active = [0]
    verification.take(verification.entries(), [4])
    verification.stop(0)
    assert (verification.active, verification.counts, verification.final) == ([], [0], [4])


@given(counts=st.lists(st.integers(1, 16), max_size=20), max_positions=st.integers(16, 40))
def test_groups_of_rows_are_bounded_and_complete(counts: list[int], max_positions: int) -> None:
    groups = list(row_groups(counts, max_positions))
    assert [row for group in groups for row in group] == list(range(len(counts)))
    assert all(sum(counts[row] for row in group) <= max_positions for group in groups)


@given(
    starts=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    counts=st.lists(st.integers(1, UniformTable.AHEAD), min_size=12, max_size=12),
)
def test_random_numbers_of_several_positions_of_a_row(starts: list[int], counts: list[int]) -> None:
    table, positions = UniformTable(4), np.array(starts)
    for step in range(3):
        number = counts[4 * step : 4 * step + len(starts)]
        rows = np.repeat(np.arange(len(starts)), number)
        wanted = np.concatenate([np.arange(start, start + n) for start, n in zip(positions, number, strict=True)])
        seeds = (rows + 7).astype(np.uint64)
        assert (table.take(rows, seeds, wanted) == uniforms(seeds, wanted)).all()
        positions = positions + np.array(number) // 2


def test_row_fails_with_its_last_draft() -> None:
    """The pages of a closed request are cleaned if the token at this index could not be sampled."""
    unused: Any = None
    table: Any = SimpleNamespace(draft_indices=lambda number, rows: rows, upload=torch.from_numpy)
    graphs: Any = SimpleNamespace(accept=lambda step, token_ids, spans: None)
    verifier = Verifier(table, *[unused] * 6, errors={})
    rows: Any = SimpleNamespace(token_ends=np.array([3, 4]))
    requests = [SimpleNamespace(uid=1), SimpleNamespace(uid=2)]
    sampled: Any = SimpleNamespace(requests=requests, row_indices=np.arange(2))
    step: Any = SimpleNamespace(token_ids=torch.tensor([7, 8, FAILED, 9]))
    drafts = StepDrafts(proposed={1: [7, 8]})
    assert verifier.accept_on_device(graphs, step, rows, sampled, drafts).last_indices == [2, 3]
