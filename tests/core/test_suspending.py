"""Suspended requests use no pages or rows, and resume exactly."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from aioengine.protocol.messages import FinishCode, Limits
from aioengine.scheduler.request import Gate
from tests.core.core_world import World, random_requests, settings_of, small_world, submit_of

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def suspend(world: World, uids: Iterable[int]) -> None:
    world.core.requests.close_gate(uids, Gate.SUSPENDED)


def resume(world: World, uids: Iterable[int]) -> None:
    world.core.requests.open_gate(uids, Gate.SUSPENDED)


@DEPTHS
@pytest.mark.parametrize("num_steps", range(6))
def test_suspended_request_frees_its_pages_and_resumes_exactly(depth: int, num_steps: int) -> None:
    world = small_world(depth, max_running=1, chunk_tokens=8)
    world.submit(submit_of(1, list(range(20))), submit_of(2, [1, 2, 3]))
    for _ in range(num_steps):
        world.step()
    suspend(world, [1, 2, 99])
    suspend(world, [1])
    world.run()
    stats = world.core.scheduler.stats(0.0)
    assert (stats.num_running, stats.num_waiting, stats.num_free_pages) == (0, 2, stats.num_pages)
    assert not world.core.has_work
    resume(world, [1, 2, 2, 99])
    world.run()
    world.check_all_over()


@DEPTHS
def test_other_requests_use_the_pages_of_a_suspended_request(depth: int) -> None:
    world = small_world(depth, num_pages=12, max_running=4)
    world.submit(submit_of(1, list(range(30))))
    world.step()
    world.submit(submit_of(2, list(range(10, 40))))
    suspend(world, [1])
    world.run()
    assert set(world.ended) == {2}
    resume(world, [1])
    world.run()
    world.check_all_over()


def test_a_suspended_request_can_be_aborted_and_keeps_its_deadline() -> None:
    world = small_world()
    world.submit(submit_of(1, [1]), submit_of(2, [2], limits=Limits(max_new_tokens=8, deadlines={"total": 3.5})))
    world.step()
    suspend(world, [1, 2])
    world.abort([1])
    assert world.core.requests.next_deadline() == 3.5
    world.now = 4.0
    world.step()
    world.run()
    assert {uid: end.code for uid, end in world.ended.items()} == {1: FinishCode.ABORT, 2: FinishCode.DEADLINE}
    resume(world, [1, 2])
    world.check_all_over()


@DEPTHS
@pytest.mark.parametrize("seed", range(6))
def test_suspending_at_random_steps_changes_no_token(depth: int, seed: int) -> None:
    draw = random.Random(seed)
    world = World(settings_of(depth=depth, max_running=4, chunk_tokens=16), num_pages=24, page_size=4)
    world.submit(*random_requests(draw, count=20, max_prompt=40, max_output=12))
    for _ in range(150):
        uids = draw.sample(range(20), 4)
        change = resume if draw.random() < 0.5 else suspend
        change(world, uids)
        world.step()
    resume(world, range(20))
    world.run()
    world.check_all_over()
