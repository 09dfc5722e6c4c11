"""When pages run out: which request is preempted, that nothing is lost, and that requests do not preempt each other."""

from __future__ import annotations

import pytest

from aioengine.protocol.messages import Limits
from tests.core.core_world import NO_EOS, World, settings_of, small_world, submit_of

LONG = Limits(max_new_tokens=200)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_newest_request_is_preempted_and_gives_the_same_tokens(depth: int) -> None:
    world = small_world(num_pages=60, depth=depth)
    world.submit(*[submit_of(uid, [uid, 1, 2], limits=LONG, arrived_at=uid) for uid in range(4)])
    world.run()
    world.check_all_over()
    assert world.preempted
    assert 0 not in world.preempted
    assert world.preempted[0] == 3
    assert next(iter(world.ended)) == 0
    assert world.core.scheduler.stats(0.0).num_preemptions == len(world.preempted)


def test_the_lowest_priority_is_preempted_first() -> None:
    world = small_world(num_pages=60)
    world.submit(*[submit_of(uid, [uid, 1, 2], limits=LONG, priority=uid, arrived_at=uid) for uid in range(4)])
    world.run()
    world.check_all_over()
    assert world.preempted[0] == 0
    assert 3 not in world.preempted


def test_a_preempted_request_reuses_its_cached_pages() -> None:
    """The pages of the preempted request are cached. Only evicted pages are computed again."""
    world = small_world(num_pages=60)
    world.submit(*[submit_of(uid, [uid, 1, 2], limits=LONG, arrived_at=uid) for uid in range(2)])
    while not world.preempted:
        world.step()
    known = 3 + len(world.outputs[1])
    world.abort([0])
    while len(world.runner.plans[-1].new_rows) == 0:
        world.step()
    plan = world.runner.plans[-1]
    assert plan.rows[-1].uid == 1
    assert plan.new_rows[0].token_ids == [1, 1, 2, *world.outputs[1][: known - 3]]
    assert known - 8 <= plan.rows[-1].start < known
    world.run()
    world.check_all_over()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_requests_run_at_least_16_steps_between_admission_and_preemption(page_size: int) -> None:
    world = World(settings_of(max_running=8), 400 // page_size, page_size, NO_EOS)
    world.submit(*[submit_of(uid, [uid, 1, 2], limits=LONG, arrived_at=uid) for uid in range(6)])
    ran: dict[int, int] = {}
    steps_between: list[int] = []
    while world.core.has_work:
        output = world.step()
        plan = world.runner.plans[-1]
        steps_between += [ran.pop(uid) for uid in (output.preempted if output else [])]
        for row in plan.rows:
            ran[row.uid] = ran.get(row.uid, 0) + 1
    world.check_all_over()
    assert steps_between
    assert min(steps_between) >= 16


def test_a_single_request_may_fill_the_pool() -> None:
    world = small_world(num_pages=10)
    world.submit(submit_of(1, [1, 2, 3], limits=Limits(max_new_tokens=500)))
    world.run()
    assert len(world.outputs[1]) == 37
    assert not world.preempted
    assert world.core.scheduler.stats(0.0).num_free_pages == 10
