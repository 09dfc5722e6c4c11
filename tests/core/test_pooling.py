"""Pooled requests: plans treat their prompts like all prompts, and they end with their vector."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.protocol.columns import TokenColumns
from aioengine.protocol.messages import FinishCode, Limits, RequestKind, Sampling, Submit
from aioengine.scheduler.plan import NOTHING, TOKENS, VECTOR, NewRow, Row, StepPlan, StepResult
from aioengine.scheduler.request import Gate
from aioengine.testing.fake_runner import FakeRunner
from aioengine.testing.faults import Faults
from tests.core.core_world import NO_EOS, random_requests, small_world, submit_of
from tests.kit.integrity import check_scheduler

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def pooled(submit: Submit, *, max_new: int = 0) -> Submit:
    limits = msgspec.structs.replace(submit.limits, max_new_tokens=max_new)
    return msgspec.structs.replace(submit, kind=RequestKind.POOL, limits=limits)


@DEPTHS
@pytest.mark.parametrize("max_new", [0, 8])
def test_pooling_request_returns_a_vector_and_no_token(depth: int, max_new: int) -> None:
    world = small_world(depth)
    world.submit(pooled(submit_of(1, list(range(10))), max_new=max_new))
    world.run()
    assert [row.outputs for plan in world.runner.plans for row in plan.rows] == [VECTOR]
    assert (world.ended[1].code, world.ended[1].matched, world.outputs[1]) == (FinishCode.STOP, None, [])
    assert set(world.runner.vectors) == {1}
    stats = world.core.scheduler.stats(world.now)
    assert (stats.prompt_tokens, stats.output_tokens, stats.num_finished) == (10, 0, 1)
    world.check_all_over()


@DEPTHS
def test_only_the_last_chunk_of_the_prompt_returns_the_vector(depth: int) -> None:
    world = small_world(depth, chunk_tokens=8)
    world.submit(pooled(submit_of(1, list(range(30)))))
    world.run()
    rows = [row for plan in world.runner.plans for row in plan.rows]
    assert [(row.count, row.outputs) for row in rows] == [(8, NOTHING)] * 3 + [(6, VECTOR)]
    world.check_all_over()


@DEPTHS
def test_pooling_and_generating_requests_share_steps_and_prefixes(depth: int) -> None:
    world = small_world(depth, chunk_tokens=16)
    prompt = list(range(24))
    world.submit(submit_of(1, prompt), pooled(submit_of(2, prompt)), submit_of(3, [7, 8]), pooled(submit_of(4, [7, 9])))
    world.run()
    assert any({row.outputs for row in plan.rows} >= {TOKENS, VECTOR} for plan in world.runner.plans)
    assert world.opened[2].first_token.num_cached == 20
    assert set(world.runner.vectors) == {2, 4}
    world.check_all_over()


def test_pooling_request_is_planned_once() -> None:
    world = small_world(1, chunk_tokens=32)
    world.submit(pooled(submit_of(1, [1] * 4)), submit_of(2, [2] * 80), submit_of(3, [3] * 50))
    world.step()
    world.step()
    assert [row.uid for row in world.rows_of(1)] == [1, 2, 3]
    assert [row.uid for row in world.rows_of(2)] == [2, 3]
    world.run()
    world.check_all_over()


@DEPTHS
def test_a_pooling_prompt_may_fill_the_context_and_the_pool(depth: int) -> None:
    for num_pages, context_length in [(64, 32), (8, 4096)]:
        world = small_world(depth, num_pages, context_length=context_length)
        world.submit(*[pooled(submit_of(uid, list(range(size)))) for uid, size in [(1, 32), (2, 33)]])
        world.run()
        assert {uid: end.code for uid, end in world.ended.items()} == {1: FinishCode.STOP, 2: FinishCode.TOO_LARGE}
        world.check_all_over()


@DEPTHS
def test_a_pooling_request_preempted_within_its_prompt_gives_its_vector(depth: int) -> None:
    world = small_world(depth, num_pages=20, chunk_tokens=16)
    world.submit(submit_of(1, [1] * 4, limits=Limits(max_new_tokens=50)))
    world.step()
    world.submit(pooled(submit_of(2, [2] * 40)))
    world.step()
    world.close_gate([2], Gate.GRAMMAR)
    world.run()
    assert world.core.scheduler.stats(world.now).num_preemptions == 1
    world.open_gate([2], Gate.GRAMMAR)
    world.run()
    world.check_all_over()


@DEPTHS
@pytest.mark.parametrize("num_steps", range(6))
def test_gates_and_aborts_of_pooling_requests_leak_no_page(depth: int, num_steps: int) -> None:
    world = small_world(depth, chunk_tokens=8)
    world.submit(pooled(submit_of(1, list(range(20)))), pooled(submit_of(2, list(range(5, 25)))))
    for _ in range(num_steps):
        world.step()
    world.close_gate([1], Gate.GRAMMAR)
    world.abort([2])
    world.run()
    world.open_gate([1], Gate.GRAMMAR)
    world.run()
    assert world.ended[1].code is FinishCode.STOP
    world.check_all_over()


def test_a_failed_row_of_a_pooling_request_ends_only_that_request() -> None:
    world = small_world(faults=Faults(fail_row_at=1))
    world.submit(pooled(submit_of(1, [1, 2])), pooled(submit_of(2, [3, 4])))
    world.run()
    assert {uid: end.code for uid, end in world.ended.items()} == {1: FinishCode.FAILED, 2: FinishCode.STOP}
    assert "fail_row_at=1" in world.ended[1].message
    world.check_all_over()


def test_a_result_without_the_vector_fails_that_request() -> None:
    world = small_world()
    world.submit(pooled(submit_of(1, [1, 2])))
    plan = world.scheduler.schedule(0.0)
    assert plan is not None
    output = world.scheduler.apply(StepResult(TokenColumns([1], [], [0])), 0.0)
    (ended,) = output.ended
    assert (ended.code, ended.message) == (FinishCode.FAILED, "the runner returned no vector")
    check_scheduler(world.core.scheduler)


def test_fake_runner_refuses_rows_of_the_wrong_kind() -> None:
    runner = FakeRunner(NO_EOS, num_pages=8, page_size=4)
    for uid, (kind, outputs) in enumerate([(RequestKind.POOL, TOKENS), (RequestKind.GENERATE, VECTOR)]):
        opened = NewRow(uid, Sampling(0), 1, [1], [uid], kind)
        with pytest.raises(RuntimeError, match=f"of kind {kind.name} has a row that gives {outputs}"):
            runner.launch(StepPlan([Row(uid, 0, 1, outputs, [1])], [opened]))


@DEPTHS
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.sampled_from([16, 24, 256]),
    max_running=st.sampled_from([1, 4, 16]),
    chunk_tokens=st.sampled_from([1, 7, 32]),
    prefix_cache=st.booleans(),
)
def test_random_mixes_of_pooling_and_generating_requests_give_the_reference(
    depth: int, *, seed: int, num_pages: int, max_running: int, chunk_tokens: int, prefix_cache: bool
) -> None:
    rng = random.Random(seed)
    world = small_world(
        depth,
        num_pages,
        max_running=max_running,
        chunk_tokens=chunk_tokens,
        prefix_cache=prefix_cache,
        context_length=4 * num_pages,
    )
    plain = random_requests(rng, count=20, max_prompt=32, max_output=20)
    waiting = [pooled(submit) if rng.random() < 0.5 else submit for submit in plain]
    aborted: set[int] = set()
    while waiting or world.core.has_work:
        if waiting and rng.random() < 0.4:
            world.submit(waiting.pop())
        if rng.random() < 0.05 and world.submitted:
            uid = rng.choice(sorted(world.submitted))
            aborted.add(uid)
            world.abort([uid])
        world.step()
    world.check_all_over()
    expected = {uid for uid, submit in world.submitted.items() if submit.kind is RequestKind.POOL}
    assert expected - aborted <= world.runner.vectors.keys() <= expected
