"""Requests with a closed gate get no rows, lose nothing, and end like all others when they are aborted."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.protocol.messages import FinishCode, Limits, Submit
from aioengine.scheduler.planner import MAX_LATER
from aioengine.scheduler.request import Gate
from tests.core.core_world import World, random_requests, small_world, submit_of

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])
NAMED = [Gate.SUSPENDED, Gate.GRAMMAR]
KEEPING = [gate for gate in NAMED if gate.keeps_pages]


def gates_of(world: World, uid: int) -> frozenset[Gate]:
    (request,) = world.scheduler.requests._requests_of([uid])
    return request.gates


@DEPTHS
@pytest.mark.parametrize("gate", NAMED)
def test_a_gate_closed_at_submission_holds_a_request_until_it_opens(depth: int, gate: Gate) -> None:
    world = small_world(depth)
    world.submit(submit_of(1, [1, 2, 3]), submit_of(2, [4, 5]))
    world.close_gate([1], gate)
    world.run()
    stats = world.core.scheduler.stats(world.now)
    assert set(world.ended) == {2}
    assert (stats.num_running, stats.num_waiting) == (0, 1)
    assert stats.num_free_pages == stats.num_pages
    assert not world.core.has_work
    world.open_gate([1], gate)
    assert world.core.has_work
    world.run()
    world.check_all_over()


@DEPTHS
@pytest.mark.parametrize("num_steps", range(1, 8))
def test_a_running_request_with_a_closed_gate_keeps_its_pages(depth: int, num_steps: int) -> None:
    """From the middle of its prompt (three chunks) to the middle of its output."""
    world = small_world(depth, chunk_tokens=8)
    world.submit(submit_of(1, list(range(20))))
    for _ in range(num_steps):
        world.step()
    world.close_gate([1], Gate.GRAMMAR)
    num_plans = len(world.runner.plans)
    world.run()
    stats = world.core.scheduler.stats(world.now)
    assert (stats.num_running, stats.num_waiting, world.core.has_work) == (1, 0, False)
    assert stats.num_free_pages < stats.num_pages
    assert len(world.runner.plans) == num_plans
    world.open_gate([1], Gate.GRAMMAR)
    world.run()
    assert world.core.scheduler.stats(world.now).num_preemptions == 0
    assert sum(row.count for plan in world.runner.plans for row in plan.rows) == 20 + 7
    world.check_all_over()


def test_each_gate_keeps_or_frees_the_pages_of_its_request() -> None:
    for gate in NAMED:
        world = small_world()
        world.submit(submit_of(1, list(range(20))))
        world.step()
        world.close_gate([1], gate)
        stats = world.core.scheduler.stats(world.now)
        assert (stats.num_running, stats.num_waiting) == ((1, 0) if gate.keeps_pages else (0, 1))
        assert (stats.num_free_pages == stats.num_pages) is not gate.keeps_pages
        world.open_gate([1], gate)
        world.run()
        world.check_all_over()


@DEPTHS
@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_a_request_runs_only_when_all_its_gates_are_open(depth: int, num_steps: int) -> None:
    world = small_world(depth)
    world.submit(submit_of(1, list(range(10))))
    for _ in range(num_steps):
        world.step()
    for gate in NAMED:
        world.close_gate([1, 99], gate)
    assert gates_of(world, 1) == set(NAMED)
    for gate in NAMED:
        world.run()
        assert not world.ended
        world.open_gate([1, 1, 99], gate)
    world.run()
    world.check_all_over()


def test_opening_a_gate_that_is_open_changes_nothing() -> None:
    world = small_world()
    world.submit(submit_of(1, list(range(10))))
    for gate in NAMED:
        world.open_gate([1], gate)
        world.step()
    assert gates_of(world, 1) == frozenset()
    world.run()
    world.check_all_over()


@DEPTHS
@pytest.mark.parametrize("gate", KEEPING)
def test_a_preempted_request_waits_until_its_gate_opens(depth: int, gate: Gate) -> None:
    world = small_world(depth, num_pages=12)
    world.submit(submit_of(1, [1] * 8, limits=Limits(max_new_tokens=36)), submit_of(2, [2] * 4))
    for _ in range(3):
        world.step()
    world.close_gate([2], gate)
    world.run()
    assert set(world.ended) == {1}
    assert world.core.scheduler.stats(world.now).num_preemptions == 1
    assert (gates_of(world, 2), world.core.scheduler.stats(world.now).num_running) == ({gate}, 0)
    world.open_gate([2], gate)
    world.run()
    world.check_all_over()


@pytest.mark.parametrize("num_steps", [0, 1, 4])
@pytest.mark.parametrize("gate", NAMED)
def test_aborts_and_deadlines_end_requests_with_a_closed_gate(num_steps: int, gate: Gate) -> None:
    world = small_world(chunk_tokens=8)
    late = submit_of(2, list(range(20)), limits=Limits(max_new_tokens=30, deadlines={"total": 9.5}))
    world.submit(submit_of(1, list(range(20, 40))), late)
    for _ in range(num_steps):
        world.step()
    world.close_gate([1, 2], gate)
    world.run()
    world.abort([1])
    assert world.core.requests.next_deadline() == 9.5
    world.now = 10.0
    world.step()
    world.run()
    assert {uid: end.code for uid, end in world.ended.items()} == {1: FinishCode.ABORT, 2: FinishCode.DEADLINE}
    world.open_gate([1, 2], gate)
    world.run()
    world.check_all_over()


def test_while_a_held_request_has_all_pages_the_core_is_idle() -> None:
    world = small_world(1, num_pages=8)
    world.submit(submit_of(1, list(range(24))))
    world.step()
    world.close_gate([1], Gate.GRAMMAR)
    late = Limits(max_new_tokens=8, deadlines={"queue": 300.0})
    world.submit(submit_of(2, [40] * 20, limits=late), submit_of(3, [41] * 20))
    world.run()
    stats = world.core.scheduler.stats(world.now)
    assert (stats.num_running, stats.num_waiting, world.core.has_work) == (1, 2, False)
    world.abort([3])
    world.run()
    world.now = 300.0
    world.step()
    world.run()
    assert world.ended[2].matched == "queue"
    world.open_gate([1], Gate.GRAMMAR)
    world.run()
    world.check_all_over()


def test_waiting_requests_run_when_a_held_request_that_has_all_pages_ends() -> None:
    world = small_world(num_pages=8)
    world.submit(submit_of(1, list(range(24))))
    world.step()
    world.close_gate([1], Gate.GRAMMAR)
    world.submit(submit_of(2, [40] * 20))
    world.run()
    world.abort([1], FinishCode.STOP)
    world.run()
    assert set(world.ended) == {2}
    world.check_all_over()


def test_a_new_request_runs_while_all_others_are_held() -> None:
    world = small_world()
    world.submit(submit_of(1, [1, 2, 3]))
    world.step()
    world.close_gate([1], Gate.GRAMMAR)
    world.run()
    world.submit(submit_of(2, [4, 5, 6]))
    world.run()
    assert set(world.ended) == {2}
    world.open_gate([1], Gate.GRAMMAR)
    world.run()
    world.check_all_over()


@DEPTHS
def test_prefix_of_a_held_request_can_be_shared(depth: int) -> None:
    world = small_world(depth)
    prompt = list(range(20))
    world.submit(submit_of(1, prompt), submit_of(2, [*prompt, 7]))
    world.step()
    world.close_gate([1], Gate.GRAMMAR)
    world.run()
    assert set(world.ended) == {2}
    assert world.opened[2].first_token.num_cached == 20
    world.open_gate([1], Gate.GRAMMAR)
    world.run()
    world.check_all_over()


def test_requests_that_wait_for_a_held_prefix_do_not_block_others() -> None:
    world = small_world(num_pages=1024, chunk_tokens=16)
    prefix = [(7 * index) % 50 for index in range(64)]
    count = MAX_LATER + 9
    world.submit(*[submit_of(uid, [*prefix, uid % 50, uid // 50], arrived_at=0.0) for uid in range(count)])
    world.step()
    world.close_gate([0], Gate.GRAMMAR)
    world.submit(submit_of(500, [1, 2], arrived_at=100.0))
    world.run()
    assert set(world.ended) == {500}
    assert [gates_of(world, uid) for uid in range(1, count)] == [frozenset({Gate.PREFIX})] * (count - 1)
    world.open_gate([0], Gate.GRAMMAR)
    world.run()
    world.check_all_over()


@pytest.mark.parametrize("depth", [1, 2])
def test_gate_closed_at_launch_keeps_a_request_out_of_overlapped_steps(depth: int) -> None:
    """Its gate closes with each launch and opens with each token; the other request is in every step."""
    world = small_world(depth)
    world.submit(submit_of(1, [1, 2, 3]), submit_of(2, [4, 5], limits=Limits(max_new_tokens=40)))
    steps_of: dict[int, list[int]] = {1: [], 2: []}
    while world.core.has_work:
        num_plans = len(world.runner.plans)
        output = world.step()
        for row in world.rows_of(num_plans + 1):
            steps_of[row.uid].append(num_plans)
            if row.uid == 1:
                world.close_gate([1], Gate.GRAMMAR)
        if output is not None and 1 in output.tokens.uids:
            world.open_gate([1], Gate.GRAMMAR)
    assert steps_of[2] == list(range(40))
    assert steps_of[1] == list(range(0, 8 * (depth + 1), depth + 1))
    world.check_all_over()


@dataclass(frozen=True)
class GateStorm:
    """The size of a world, and how often its gates move."""

    seed: int
    num_pages: int
    max_running: int
    chunk_tokens: int
    prefix_cache: bool
    share_closed: float


storms = st.builds(
    GateStorm,
    seed=st.integers(0, 2**32),
    num_pages=st.sampled_from([16, 24, 64]),
    max_running=st.sampled_from([1, 4, 16]),
    chunk_tokens=st.sampled_from([1, 7, 64]),
    prefix_cache=st.booleans(),
    share_closed=st.sampled_from([0.2, 0.5, 0.9]),
)


@DEPTHS
@given(storm=storms)
def test_random_gates_and_aborts_change_no_token_and_leak_no_page(depth: int, storm: GateStorm) -> None:
    rng = random.Random(storm.seed)
    world = small_world(
        depth,
        storm.num_pages,
        max_running=storm.max_running,
        chunk_tokens=storm.chunk_tokens,
        prefix_cache=storm.prefix_cache,
        context_length=storm.num_pages * 4,
    )
    waiting = [_maybe_late(submit, rng) for submit in random_requests(rng, count=20, max_prompt=32, max_output=16)]
    for _ in range(120):
        if waiting and rng.random() < 0.5:
            world.submit(waiting.pop())
        change = world.close_gate if rng.random() < storm.share_closed else world.open_gate
        change(rng.sample(range(20), 3), rng.choice(NAMED))
        if rng.random() < 0.1 and world.submitted:
            uids = rng.sample(sorted(world.submitted), 1)
            world.abort(uids, rng.choice([FinishCode.ABORT, FinishCode.STOP]))
        world.step()
    world.submit(*waiting)
    for gate in NAMED:
        world.open_gate(range(20), gate)
    world.run()
    world.check_all_over()


def _maybe_late(submit: Submit, rng: random.Random) -> Submit:
    if rng.random() < 0.8:
        return submit
    limits = msgspec.structs.replace(submit.limits, deadlines={"total": rng.uniform(0, 150)})
    return msgspec.structs.replace(submit, limits=limits)
