"""Results of rows with no, one or several tokens, and their extras."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from aioengine.protocol.columns import NO_TOKEN, POOLED_VECTOR, Extra, TokenColumns
from aioengine.protocol.messages import FinishCode, Limits
from aioengine.scheduler.plan import Row, StepResult
from aioengine.testing.fake_runner import FakeModel, FakeTicket, extra_of
from tests.core.core_world import World, random_requests, settings_of, submit_of
from tests.core.test_pooling import pooled
from tests.kit.fake_reference import reference_vector

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def world_of(tokens_per_step: str, *, depth: int = 0, num_pages: int = 64, **settings: int | bool) -> World:
    model = FakeModel(
        vocab_size=50, eos_token_id=3, eos_probability=0.02, tokens_per_step=tokens_per_step, gives_extras=True
    )
    return World(settings_of(depth=depth, **settings), num_pages, page_size=4, model=model)


@DEPTHS
@pytest.mark.parametrize("tokens_per_step", ["2", "3121", "13", "3", "112"])
def test_the_number_of_tokens_per_step_does_not_change_the_output(tokens_per_step: str, depth: int) -> None:
    world = world_of(tokens_per_step, depth=depth)
    for uid in range(4):
        world.submit(submit_of(uid, list(range(uid, 3 * uid + 6)), limits=Limits(9 + uid, stop_token_ids=(3,))))
    world.run()
    world.check_all_over()


def test_two_tokens_in_each_step_halve_the_number_of_steps() -> None:
    steps = {}
    for tokens_per_step in ("1", "2"):
        world = world_of(tokens_per_step)
        world.submit(submit_of(1, [5] * 6, limits=Limits(16)))
        world.run()
        steps[tokens_per_step] = len(world.runner.plans)
    assert (steps["1"], steps["2"]) == (16, 8)


def test_a_row_computes_all_tokens_of_the_previous_step() -> None:
    world = world_of("21")
    world.submit(submit_of(1, [5] * 6, limits=Limits(5)))
    world.run()
    rows = [row for plan in world.runner.plans for row in plan.rows]
    assert [(row.start, row.count) for row in rows] == [(0, 6), (6, 2), (8, 1)]
    assert rows[1].token_ids == world.outputs[1][:2]
    assert rows[2].token_ids == []


@pytest.mark.parametrize(("depth", "num_steps"), [(0, 4), (1, 8), (2, 12)])
def test_rows_in_flight_compute_the_first_of_the_forced_tokens(depth: int, num_steps: int) -> None:
    model = FakeModel(vocab_size=50, tokens_per_step="4")
    world = World(settings_of(depth=depth), 64, page_size=4, model=model)
    world.submit(submit_of(1, [5] * 6, limits=Limits(16)), submit_of(2, [6] * 3, limits=Limits(16)))
    world.run()
    world.check_all_over()
    assert len(world.runner.plans) == num_steps
    for uid, num_prompt in ((1, 6), (2, 3)):
        rows = [row for plan in world.runner.plans for row in plan.rows if row.uid == uid]
        assert len(rows) == num_steps, "a step without a row of the request"
        ends = [row.start + row.count for row in rows]
        assert [row.start for row in rows] == [0, *ends[:-1]]
        assert ends[num_steps - depth - 1] == num_prompt + 12


@pytest.mark.parametrize("depth", [1, 2])
def test_a_forced_token_sampled_by_a_step_in_flight_changes_no_plan(depth: int) -> None:
    rows: list[list[Row]] = []
    for tokens_per_step in "12":
        model = FakeModel(vocab_size=50, tokens_per_step=tokens_per_step)
        world = World(settings_of(depth=depth), 64, page_size=4, model=model)
        world.submit(submit_of(1, [5] * 6))
        world.run()
        rows.append([row for plan in world.runner.plans for row in plan.rows])
    assert rows[0] == rows[1]


def test_a_row_without_its_token_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of("1")
    world.submit(submit_of(1, [5] * 6), submit_of(2, [7] * 5))
    monkeypatch.setattr(world.runner, "collect", lambda _: StepResult(TokenColumns([1, 2], [9], [0, 1])))
    world.step()
    assert world.outputs == {1: [], 2: [9]}
    assert (world.ended[1].code, world.ended[1].message) == (FinishCode.FAILED, "the runner returned no token")
    assert 2 not in world.ended


@DEPTHS
def test_many_forced_tokens_are_computed_in_chunks_together_with_prompts(depth: int) -> None:
    world = world_of("9", depth=depth, chunk_tokens=8, max_running=4)
    world.submit(submit_of(1, [5] * 6, limits=Limits(28)), submit_of(2, [5] * 40))
    world.run()
    world.check_all_over()
    plans = [[(row.uid, row.count, row.outputs) for row in plan.rows] for plan in world.runner.plans]
    assert [(1, 5, 0), (2, 2, 0)] in plans
    assert [(1, 4 - depth, 1), (2, 3 + depth, 0)] in plans
    assert max(plan.num_tokens for plan in world.runner.plans) <= 8


@pytest.mark.parametrize(("num_new", "code"), [(3, FinishCode.STOP), (2, FinishCode.LENGTH), (4, FinishCode.STOP)])
def test_several_tokens_can_complete_a_grammar(num_new: int, code: FinishCode, monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of("3")
    world.submit(submit_of(1, [5] * 6, limits=Limits(num_new)))
    collect = world.runner.collect

    def collect_complete(ticket: FakeTicket) -> StepResult:
        return replace(collect(ticket), complete=[1])

    monkeypatch.setattr(world.runner, "collect", collect_complete)
    world.run()
    assert (len(world.outputs[1]), world.ended[1].code) == (min(num_new, 3), code)
    assert len(world.runner.plans) == 1


def test_tokens_after_max_new_tokens_are_dropped() -> None:
    world = world_of("3")
    world.submit(submit_of(1, [5] * 6, limits=Limits(4)))
    world.run()
    assert len(world.outputs[1]) == 4
    assert world.ended[1].code is FinishCode.LENGTH
    assert world.core.scheduler.stats(0.0).output_tokens == 4
    world.check_all_over()


@DEPTHS
@given(
    seed=st.integers(0, 2**32),
    tokens_per_step=st.text("1239", min_size=1, max_size=5),
    num_pages=st.sampled_from([16, 24, 256]),
    chunk_tokens=st.sampled_from([1, 7, 32]),
)
def test_random_requests_give_the_reference_tokens_and_one_extra_per_token(
    depth: int, *, seed: int, tokens_per_step: str, num_pages: int, chunk_tokens: int
) -> None:
    rng = random.Random(seed)
    world = world_of(
        tokens_per_step, depth=depth, num_pages=num_pages, chunk_tokens=chunk_tokens, context_length=4 * num_pages
    )
    waiting = random_requests(rng, count=16, max_prompt=24, max_output=30)
    waiting = [pooled(submit) if rng.random() < 0.2 else submit for submit in waiting]
    aborted = rng.sample(range(16), 2)
    while waiting or world.core.has_work:
        if waiting and rng.random() < 0.4:
            world.submit(waiting.pop())
        if rng.random() < 0.05:
            world.abort(aborted)
        world.step()
    world.check_all_over()
    assert all(plan.num_tokens <= world.settings.max_step_tokens for plan in world.runner.plans)
    for uid, output in world.outputs.items():
        extras = {extra.index: extra for extra in world.extras.get(uid, []) if extra.kind != POOLED_VECTOR}
        assert {index: extras[index] for index in range(len(output))} == {
            index: extra_of(uid, index, token_id) for index, token_id in enumerate(output)
        }


@DEPTHS
def test_a_pooled_vector_is_an_extra_of_the_output(depth: int) -> None:
    world = world_of("1", depth=depth)
    world.submit(pooled(submit_of(1, [5, 6, 7])), submit_of(2, [5, 6]))
    world.run()
    assert world.extras[1] == [Extra(1, NO_TOKEN, POOLED_VECTOR, reference_vector([5, 6, 7]))]
    world.check_all_over()


@pytest.mark.parametrize("depth", [1, 2])
def test_results_of_an_aborted_request_are_dropped_with_their_extras(depth: int) -> None:
    world = world_of("1", depth=depth)
    world.submit(submit_of(1, [5, 6, 7]), submit_of(2, [8, 9]))
    while not world.outputs[1]:
        world.step()
    world.abort([1])
    num_extras = len(world.extras[1])
    world.run()
    assert len(world.extras[1]) == num_extras == len(world.outputs[1])
    world.check_all_over()


def test_rows_can_be_added_iterated_and_limited() -> None:
    tokens = TokenColumns(extras=[extra_of(1, 0, 5), extra_of(2, 4, 6)])
    tokens.add(1, [5])
    assert (tokens.counts, list(tokens.rows())) == (None, [5])
    tokens.add(2, [6, 7, 8])
    tokens.add(3, ())
    tokens.add(4, [9])
    assert tokens == TokenColumns([1, 2, 3, 4], [5, 6, 7, 8, 9], [1, 3, 0, 1], tokens.extras)
    assert list(tokens.rows()) == [[5], [6, 7, 8], [], [9]]
    assert list(tokens.uid_of_each()) == [1, 2, 2, 2, 4]
    assert tokens.limited({1: 0, 2: 2}) == TokenColumns([2, 3, 4], [6, 7, 9], [2, 0, 1], [extra_of(2, 4, 6)])
