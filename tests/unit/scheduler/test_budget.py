"""The token budget of a step is divided among prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.scheduler.admission import MIN_SHARE, TokenBudget
from aioengine.settings.config import SchedulerSettings


@pytest.mark.parametrize(
    ("chunk_tokens", "num_decodes", "left"), [(512, 0, 512), (512, 100, 412), (512, 500, 64), (4, 9, 1)]
)
def test_a_part_of_the_budget_is_kept_for_prompts(chunk_tokens: int, num_decodes: int, left: int) -> None:
    assert TokenBudget(chunk_tokens, num_decodes).left == left


@given(st.integers(1, 1200), st.integers(0, 1200), st.sampled_from([1, 4]), st.data())
def test_no_step_has_more_than_max_step_tokens(
    max_running: int, more: int, decode_cost: int, data: st.DataObject
) -> None:
    settings = SchedulerSettings(
        max_running=max_running,
        chunk_tokens=max_running + more,
        context_length=1,
        policy="fcfs",
        prefix_cache=True,
        depth=1,
        decode_cost=decode_cost,
    )
    num_decodes = data.draw(st.integers(0, max_running - 1))  # one more row has the prompt
    budget = TokenBudget(settings.chunk_tokens, decode_cost * num_decodes)
    assert num_decodes + budget.left <= settings.max_step_tokens
    assert settings.chunk_tokens <= settings.max_step_tokens


def test_a_long_prompt_leaves_half_of_the_budget_to_later_ones() -> None:
    budget = TokenBudget(512, 0)
    assert budget.take_share(10_000) == 256
    assert budget.take_share(100) == 100
    assert budget.take_share(10_000) == 78
    assert budget.take_rest(10_000) == 78
    assert budget.left == 0


def test_a_prompt_that_fits_the_budget_is_not_split() -> None:
    budget = TokenBudget(100, 0)
    assert budget.take_share(100) == 100
    assert budget.take_share(1) == 0


@given(st.integers(1, 600), st.lists(st.integers(1, 900), max_size=12))
def test_the_budget_is_used_up_and_not_exceeded(chunk_tokens: int, wanted: list[int]) -> None:
    budget = TokenBudget(chunk_tokens, 0)
    shares = [budget.take_share(want) for want in wanted]
    shares = [share + budget.take_rest(want - share) for want, share in zip(wanted, shares, strict=True)]
    assert sum(shares) == min(sum(wanted), chunk_tokens)
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
    if wanted:
        assert shares[0] >= min(wanted[0], max(chunk_tokens // 2, MIN_SHARE), chunk_tokens)
