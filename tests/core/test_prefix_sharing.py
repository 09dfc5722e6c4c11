"""A prefix is computed once, also for requests that arrive together. None waits for a prefix that is not computed."""

from __future__ import annotations

import pytest

from aioengine.memory.prefix_cache import Match, PrefixCache
from aioengine.memory.radix import Node
from aioengine.protocol.messages import FinishCode, Limits, Submit
from aioengine.scheduler.planner import MAX_LATER
from tests.core.core_world import World, settings_of, submit_of

PREFIX = [(7 * index) % 50 for index in range(1024)]
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def family(count: int, *, own: int = 32, max_new: int = 4) -> list[Submit]:
    """Return requests that share ``PREFIX`` and then differ."""
    limits = Limits(max_new_tokens=max_new)
    return [
        submit_of(uid, [*PREFIX, uid, *range(own - 1)], limits=limits, arrived_at=uid / 100) for uid in range(count)
    ]


def world_of(depth: int, *, num_pages: int = 1024, **changes: int | str | bool) -> World:
    return World(settings_of(depth=depth, max_running=64, chunk_tokens=256, **changes), num_pages, 16)


def num_computed(world: World) -> int:
    return sum(plan.num_tokens for plan in world.runner.plans)


def num_prompt_computed(world: World) -> int:
    return sum(len(row.token_ids) for plan in world.runner.plans for row in plan.rows)


@DEPTHS
def test_a_shared_prefix_of_requests_that_arrive_together_is_computed_once(depth: int) -> None:
    world = world_of(depth)
    world.submit(*family(32))
    world.run()
    world.check_all_over()
    assert num_prompt_computed(world) == 1024 + 32 * 32
    assert sorted(opened.first_token.num_cached for opened in world.opened.values()) == [0] + [1024] * 31
    stats = world.core.scheduler.stats(0.0)
    assert (stats.prompt_tokens, stats.cached_tokens) == (32 * 1056, 31 * 1024)


@DEPTHS
def test_other_requests_run_while_some_wait_for_a_prefix(depth: int) -> None:
    world = world_of(depth)
    world.submit(*family(8), submit_of(100, [1, 2, 3], arrived_at=9.0))
    world.step()
    assert {row.uid for row in world.runner.plans[0].rows} == {0, 100}
    world.run()
    world.check_all_over()


@DEPTHS
@pytest.mark.parametrize("num_steps", [1, 2, 4, 5])
def test_another_request_computes_the_prefix_after_an_abort(depth: int, num_steps: int) -> None:
    world = world_of(depth)
    world.submit(*family(6))
    for _ in range(num_steps):
        world.step()
    world.abort([0])
    world.run()
    world.check_all_over()
    assert world.ended[0].code is FinishCode.ABORT
    assert num_prompt_computed(world) <= 1056 + 256 * (depth + 1) + 5 * 32


@DEPTHS
def test_another_request_computes_the_prefix_after_a_preemption(depth: int) -> None:
    """The family has the lower priority; the running request with the higher one needs all pages."""
    world = world_of(depth, num_pages=72)
    world.submit(submit_of(100, [5] * 20, limits=Limits(max_new_tokens=400), priority=1))
    for _ in range(4):
        world.step()
    world.submit(*family(3))
    world.run()
    world.check_all_over()


def test_later_requests_find_the_prefix_in_the_cache() -> None:
    world = world_of(0)
    world.submit(*family(1))
    world.run()
    before = num_prompt_computed(world)
    world.submit(*[submit_of(uid, [*PREFIX[:500], uid]) for uid in range(10, 13)])
    world.run()
    world.check_all_over()
    assert {world.opened[uid].first_token.num_cached for uid in range(10, 13)} == {31 * 16}
    assert num_prompt_computed(world) - before == 3 * (501 - 31 * 16)


def test_the_next_turn_of_a_chat_finds_the_answer_in_the_cache() -> None:
    world = world_of(0)
    first = submit_of(1, PREFIX[:30], limits=Limits(max_new_tokens=40))
    world.submit(first)
    world.run()
    second = submit_of(2, [*PREFIX[:30], *world.outputs[1], 1, 2, 3])
    world.submit(second)
    world.run()
    assert len(world.outputs[1]) + 30 > 64 or world.model.eos_token_id in world.outputs[1]
    assert world.opened[2].first_token.num_cached == (30 + len(world.outputs[1]) - 1) // 16 * 16
    world.check_all_over()


def test_equal_prompts_that_arrive_together_share_all_but_their_last_page() -> None:
    world = world_of(1)
    world.submit(*[submit_of(uid, PREFIX[:64], limits=Limits(max_new_tokens=40)) for uid in range(6)])
    world.run()
    world.check_all_over()
    assert {opened.first_token.num_cached for opened in world.opened.values()} == {0, 48}


def test_without_the_prefix_cache_every_request_computes_all_its_tokens() -> None:
    world = world_of(0, prefix_cache=False)
    world.submit(*family(3))
    world.run()
    world.check_all_over()
    assert num_prompt_computed(world) == 3 * 1056
    assert world.core.scheduler.stats(0.0).num_cached_pages == 0


def test_request_that_waits_for_a_prefix_is_matched_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = world_of(0)
    looks: list[int] = []
    match = PrefixCache.match

    def counted(self: PrefixCache, token_ids: list[int], salt: str = "", *, known: Node | None = None) -> Match:
        looks.append(len(token_ids))
        return match(self, token_ids, salt, known=known)

    monkeypatch.setattr(PrefixCache, "match", counted)
    world.submit(*family(50))
    world.run()
    world.check_all_over()
    assert len(looks) == 50 + 49


def test_the_first_matches_of_many_requests_are_spread_over_steps() -> None:
    world = world_of(0)
    world.submit(*family(200, own=2))
    world.step()
    waiting = [request for request in world.scheduler.requests.waiting if request.waits_for is not None]
    assert len(waiting) == MAX_LATER
    world.run()
    world.check_all_over()
    assert num_prompt_computed(world) == 1024 + 200 * 2
