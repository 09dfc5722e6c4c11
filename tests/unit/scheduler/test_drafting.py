"""The decision how many drafts a row gets, with step times as numbers."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.scheduler.drafting import (
    EMPTY_STEPS,
    FIRST_PLAIN,
    MAX_EMPTY_PAUSE,
    MAX_PAUSE,
    PLAIN_EVERY,
    PROBE,
    Acceptance,
    DraftCosts,
)

MAX_DRAFTS = 7


def measured(
    *, plain_s: float, draft_s: float, num_rows: int = 1, overhead_s: float = 0.0, noise: float = 0.0
) -> DraftCosts:
    """Return the costs after 60 plain steps and 60 steps with 0 to 7 drafts for each row."""
    costs, rng = DraftCosts(), random.Random(0)
    for step in range(60):
        num_drafts = num_rows * (step % 8)
        seconds = plain_s + overhead_s + draft_s * num_drafts
        noises = [1 + noise * rng.uniform(-1, 1) for _ in range(2)]
        costs.note_step(plain_s * noises[0], num_rows=num_rows, num_drafts=0, may_draft=False)
        costs.note_step(seconds * noises[1], num_rows=num_rows, num_drafts=num_drafts, may_draft=True)
    return costs


def accepting(num_proposed: int, num_accepted: int, *, times: int = 40) -> Acceptance:
    acceptance = Acceptance(0.5)
    for _ in range(times):
        acceptance.note(num_proposed, num_accepted)
    return acceptance


@given(plain_s=st.floats(1e-4, 10), share=st.floats(0.01, 2), num_rows=st.sampled_from([1, 2, 7, 64]))
def test_prices_are_measured_in_tokens(plain_s: float, share: float, num_rows: int) -> None:
    draft_s = share * plain_s / num_rows
    costs = measured(plain_s=plain_s, draft_s=draft_s, overhead_s=plain_s / 4, num_rows=num_rows)
    price, price_of_row = costs.price(num_rows)
    assert price == pytest.approx(share, rel=1e-6)
    assert price_of_row == pytest.approx(0.25, rel=1e-6, abs=1e-6)


def test_noise_and_outliers_change_prices_little() -> None:
    costs = measured(plain_s=1.0, draft_s=0.1, noise=0.1)
    costs.note_step(100.0, num_rows=1, num_drafts=0, may_draft=False)
    price, price_of_row = costs.price(1)
    assert 0.05 < price < 0.15
    assert price_of_row < 0.15


def test_steps_with_always_the_same_number_of_drafts_have_a_price() -> None:
    costs = DraftCosts()
    for _ in range(20):
        costs.note_step(1.0, num_rows=1, num_drafts=0, may_draft=False)
        costs.note_step(1.7, num_rows=1, num_drafts=7, may_draft=True)
    assert costs.price(1) == pytest.approx((0.1, 0.0))


def test_without_measurements_drafts_are_free() -> None:
    assert DraftCosts().price(5) == (0.0, 0.0)
    assert Acceptance(0.5).count((0.0, 0.0), MAX_DRAFTS) == MAX_DRAFTS


@pytest.mark.parametrize(
    ("accepted", "price", "count"),
    [(7, 0.5, 7), (7, 0.95, 5), (3, 0.1, 7), (3, 0.4, 3), (3, 0.7, 1), (0, 0.1, PROBE), (3, 1.5, PROBE)],
)
def test_a_row_gets_the_drafts_that_are_worth_their_price(accepted: int, price: float, count: int) -> None:
    assert accepting(MAX_DRAFTS, accepted).count((price, 0.0), MAX_DRAFTS) == count


def test_drafts_stop_with_more_rows() -> None:
    """A draft adds 2 % of the time of a step: with one row it pays even if few are accepted, with 64 rows never."""
    counts = {}
    for num_rows in (1, 8, 64):
        costs = measured(plain_s=1.0, draft_s=0.02, num_rows=num_rows)
        counts[num_rows] = accepting(MAX_DRAFTS, 2).count(costs.price(num_rows), MAX_DRAFTS)
    assert counts[1] > counts[8] > counts[64] == PROBE


def test_drafts_that_are_never_accepted_stop_and_are_tried_less_often() -> None:
    acceptance, probes = Acceptance(0.5), []
    for step in range(4000):
        if not acceptance.is_paused():
            probes.append(step)
            acceptance.note(acceptance.count((0.1, 0.0), MAX_DRAFTS), 0)
    pauses = [after - before - 1 for before, after in itertools.pairwise(probes)]
    assert len(probes) < 40
    assert pauses[-5:] == [MAX_PAUSE] * 5


def test_drafts_start_again_when_they_are_accepted() -> None:
    acceptance = accepting(MAX_DRAFTS, 0)
    counts = []
    for _ in range(2 * MAX_PAUSE):
        if not acceptance.is_paused():
            counts.append(acceptance.count((0.1, 0.0), MAX_DRAFTS))
            acceptance.note(counts[-1], counts[-1])
    assert counts[0] == PROBE
    assert counts[-1] == MAX_DRAFTS


def test_drafts_are_searched_less_often_if_none_are_found() -> None:
    acceptance, steps = Acceptance(0.5), []
    for step in range(8000):
        if not acceptance.is_paused():
            steps.append(step)
            acceptance.note(0, 0)
    pauses = [after - before - 1 for before, after in itertools.pairwise(steps)]
    assert pauses[: EMPTY_STEPS - 1] == [0] * (EMPTY_STEPS - 1)
    assert pauses[-5:] == [MAX_EMPTY_PAUSE] * 5
    while acceptance.is_paused():
        pass
    acceptance.note(1, 0)
    acceptance.note(0, 0)
    assert not acceptance.is_paused()


def test_drafts_must_pay_for_a_step_that_costs_more() -> None:
    """On a GPU, a step with drafts may not overlap the one before."""
    accepting_some = accepting(MAX_DRAFTS, 1)
    assert accepting_some.count((0.1, 0.2), MAX_DRAFTS) > PROBE
    assert accepting_some.count((0.1, 0.7), MAX_DRAFTS) == PROBE


def test_the_time_of_a_plain_step_is_not_the_one_that_the_next_step_with_drafts_delays() -> None:
    costs = DraftCosts()
    for step in range(2, 402):
        is_plain = step % 20 < 2
        seconds = 1.0 if step % 20 == 0 else 1.3
        costs.note_step(seconds, num_rows=1, num_drafts=0, may_draft=not is_plain)
    assert costs.price(1)[1] == pytest.approx(0.3, rel=0.01)


def test_plain_steps_are_measured_from_time_to_time() -> None:
    costs, kinds = DraftCosts(), []
    for _ in range(1000):
        is_plain = costs.is_plain_due(3)
        kinds.append(is_plain)
        costs.note_step(1.0, num_rows=3, num_drafts=0 if is_plain else 5, may_draft=not is_plain)
    assert kinds.index(True) == FIRST_PLAIN
    assert sum(kinds) < 1000 / PLAIN_EVERY + 8


def test_the_rate_of_new_requests_follows_all_requests() -> None:
    costs = DraftCosts()
    for _ in range(200):
        costs.note_drafts(4, 4)
    assert costs.rate > 0.95
    for _ in range(200):
        costs.note_drafts(1, 0)
    assert costs.rate < 0.05


@given(
    noted=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), max_size=60),
    price=st.floats(0, 5),
    price_of_row=st.floats(0, 5),
    max_drafts=st.integers(1, 15),
)
def test_counts_are_within_their_limits(
    noted: list[tuple[int, int]], price: float, price_of_row: float, max_drafts: int
) -> None:
    acceptance = Acceptance(0.0)
    for num_proposed, num_accepted in noted:
        assert 0 <= acceptance.count((price, price_of_row), max_drafts) <= max_drafts
        acceptance.note(num_proposed, min(num_proposed, num_accepted))
