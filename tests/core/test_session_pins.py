"""Pages of sessions in the scheduler: pinned by answers, evicted for requests that need them, free after the close."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from aioengine.protocol.messages import FinishCode, Limits, Submit
from tests.core.core_world import NO_EOS, World, random_requests, settings_of, submit_of
from tests.kit.integrity import check_scheduler


def world_of(num_pages: int, depth: int = 0) -> World:
    settings = settings_of(depth=depth, context_length=num_pages * 16, max_running=8, chunk_tokens=64)
    return World(settings, num_pages=num_pages, page_size=16, model=NO_EOS)


def turn(uid: int, prompt: list[int], session: int, max_new_tokens: int = 8) -> Submit:
    return replace(submit_of(uid, prompt, limits=Limits(max_new_tokens=max_new_tokens)), session=session)


def num_pinned(world: World) -> int:
    return world.scheduler.stats(0.0).num_pinned_pages


@pytest.mark.parametrize("depth", [0, 1])
def test_answers_pin_their_pages_until_the_session_is_closed(depth: int) -> None:
    world = world_of(16, depth)
    first = [uid % 50 for uid in range(60)]
    world.submit(turn(1, first, 1))
    world.run()
    assert num_pinned(world) == 4
    world.submit(submit_of(2, [7] * 150), submit_of(3, [8] * 150))
    world.run()
    second = [*first, *world.outputs[1], 5]
    world.submit(turn(4, second, 1))
    world.run()
    assert world.opened[4].first_token.num_cached == 64
    world.core.requests.close_session(1)
    assert num_pinned(world) == 0
    world.check_all_over()


def test_sessions_block_no_admission() -> None:
    """All pages are pinned; a request that needs most of them is admitted in the next step."""
    world = world_of(12)
    for session in range(1, 4):
        world.submit(turn(session, [session] * 57, session))
        world.run()
    assert num_pinned(world) == 12
    assert world.scheduler.stats(0.0).num_free_pages == 12
    num_steps = len(world.runner.plans)
    world.submit(submit_of(9, [9] * 60, limits=Limits(max_new_tokens=60)))
    world.step()
    assert [row.uid for row in world.rows_of(num_steps + 1)] == [9]
    world.run()
    assert world.preempted == []
    assert num_pinned(world) == 4  # the pages of the session that was used last
    world.submit(turn(10, [1] * 58, 1))
    world.run()
    world.check_all_over()


def test_aborted_requests_and_closed_sessions_pin_no_pages() -> None:
    world = world_of(16)
    world.submit(turn(1, [1] * 40, 1, max_new_tokens=100), turn(2, [2] * 40, 2))
    world.step()
    world.abort([1])
    world.core.requests.close_session(2)
    world.run()
    assert num_pinned(world) == 0
    world.core.requests.close_session(77)
    world.check_all_over()


def test_a_session_keeps_its_pages_when_the_detokenizer_is_replaced() -> None:
    world = world_of(16)
    world.submit(turn(1, [1] * 60, 1))
    world.run()
    world.forget_all()
    assert num_pinned(world) == 4
    world.core.requests.close_session(1)
    assert num_pinned(world) == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_random_sessions_change_no_token_and_leave_no_page(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    world = World(
        settings_of(depth=depth, context_length=256, max_running=rng.choice([1, 3, 16]), chunk_tokens=32),
        num_pages=64 if rng.random() < 0.5 else 20,
        page_size=4,
    )
    half = 2 * world.num_pages
    waiting = random_requests(rng, count=24, max_prompt=min(half, 100), max_output=min(half, 40))
    while waiting or world.core.has_work:
        while waiting and rng.random() < 0.4:
            world.submit(replace(waiting.pop(), session=rng.randrange(5)))
        if rng.random() < 0.1:
            world.core.requests.close_session(rng.randrange(5))
        if rng.random() < 0.05:
            living = sorted(world.submitted.keys() - world.ended.keys() - world.stopped)
            world.abort(living[:1], rng.choice([FinishCode.ABORT, FinishCode.STOP]))
        world.step()
        check_scheduler(world.scheduler)
    for session in range(5):
        world.core.requests.close_session(session)
    assert num_pinned(world) == 0
    world.check_all_over()
