"""Rows with drafts: plans assume that all drafts are accepted, and results say how many were rejected."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from aioengine.protocol.messages import FinishCode, Limits, Media
from aioengine.settings.page_groups import PageGroups
from aioengine.testing.fake_runner import FakeModel
from tests.core.core_world import World, random_requests, settings_of, submit_of

ZEROS = FakeModel(vocab_size=1, accepts="3")
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def world_of(accepts: str, *, depth: int = 0, num_pages: int = 64, **settings: int | bool) -> World:
    """Return a world with three drafts per row. accepts: as in ``FakeModel``."""
    model = FakeModel(vocab_size=50, accepts=accepts)
    return World(settings_of(depth=depth, **{"max_drafts": 3, **settings}), num_pages, page_size=4, model=model)


def cached_prefixes(world: World) -> set[tuple[object, ...]]:
    """Return the keys of all paths from the root of the prefix cache."""
    prefixes: set[tuple[object, ...]] = set()
    nodes = [((), world.scheduler.cache._tree.root)]
    while nodes:
        path, node = nodes.pop()
        nodes += [((*path, key), child) for key, child in node.children.items()]
        prefixes.add(path)
    return prefixes


@DEPTHS
@given(
    seed=st.integers(0, 2**32),
    accepts=st.text("0123459", min_size=1, max_size=5),
    tokens_per_step=st.sampled_from(["1", "1", "14", "3"]),
    max_drafts=st.sampled_from([1, 2, 5, 9]),
    num_pages=st.sampled_from([16, 24, 256]),
    chunk_tokens=st.sampled_from([1, 7, 32, 256]),
    windows=st.sampled_from([(), (), (None, 6), (5,)]),
)
def test_random_acceptance_gives_the_reference_tokens_and_loses_no_page(
    depth: int,
    *,
    seed: int,
    accepts: str,
    tokens_per_step: str,
    max_drafts: int,
    num_pages: int,
    chunk_tokens: int,
    windows: tuple[int | None, ...],
) -> None:
    rng = random.Random(seed)
    model = FakeModel(
        vocab_size=50, eos_token_id=3, eos_probability=0.02, tokens_per_step=tokens_per_step, accepts=accepts
    )
    num_tokens = PageGroups(windows=windows or (None,), page_size=4).tokens_in(num_pages, 4 * num_pages)
    settings = settings_of(
        depth=depth, chunk_tokens=chunk_tokens, context_length=num_tokens, max_drafts=max_drafts, max_running=8
    )
    world = World(settings, num_pages, page_size=4, model=model, windows=windows)
    waiting = random_requests(rng, count=16, max_prompt=min(24, num_tokens // 2), max_output=min(30, num_tokens // 2))
    while waiting or world.core.has_work:
        if waiting and rng.random() < 0.4:
            world.submit(waiting.pop())
        if rng.random() < 0.05 and world.submitted:
            world.abort([rng.choice(sorted(world.submitted))], rng.choice([FinishCode.ABORT, FinishCode.STOP]))
        world.step()
    assert all(plan.num_tokens <= settings.max_step_tokens for plan in world.runner.plans)
    world.check_all_over()


@DEPTHS
@given(seed=st.integers(0, 2**32), accepts=st.text("0123", min_size=1, max_size=5))
def test_drafts_do_not_change_the_cached_prefixes(depth: int, seed: int, accepts: str) -> None:
    prefixes: list[set[tuple[object, ...]]] = []
    for max_drafts in (0, 3):
        world = world_of(accepts, depth=depth, num_pages=1024, max_drafts=max_drafts)
        submits = random_requests(random.Random(seed), count=8, max_prompt=24, max_output=30)
        world.submit(*submits)
        world.run()
        prefixes.append(cached_prefixes(world))
        continued = [submit.prompt_token_ids + world.outputs[submit.uid] for submit in submits]
        world.submit(*(submit_of(100 + uid, token_ids) for uid, token_ids in enumerate(continued)))
        world.run()  # cached pages have the right KV
        world.check_all_over()
    assert prefixes[0] <= prefixes[1]
    for path in prefixes[1] - prefixes[0]:  # a page that ends with an accepted stop token
        token_ids = [token_id for key in path for token_id in key]
        assert len(path[-1]) == 4
        assert token_ids in continued, "a page of tokens after the end of a request"


@pytest.mark.parametrize(("accepts", "num_steps"), [("0", 16), ("1", 9), ("3", 5)])
def test_accepted_drafts_save_steps(accepts: str, num_steps: int) -> None:
    world = world_of(accepts)
    world.submit(submit_of(1, [5] * 6, limits=Limits(16)))
    world.run()
    assert len(world.runner.plans) == num_steps
    world.check_all_over()


def test_rows_in_flight_start_at_an_upper_bound_and_are_not_discarded() -> None:
    world = world_of("1", depth=1)
    world.submit(submit_of(1, [5] * 6, limits=Limits(40)))
    for _ in range(5):
        world.step()
    rows = [row for plan in world.runner.plans for row in plan.rows]
    # each row has one known token and three drafts, of which two are rejected one step after the next row is planned
    assert [(row.start, row.count, row.num_drafts) for row in rows] == [
        (0, 6, 0),
        (6, 4, 3),
        (10, 4, 3),
        (12, 4, 3),
        (14, 4, 3),
    ]
    assert len(world.outputs[1]) == 1 + 3 * 2
    world.run()
    world.check_all_over()


@DEPTHS
@pytest.mark.parametrize("max_new_tokens", [1, 2, 5, 6, 7])
def test_drafts_end_before_max_new_tokens(depth: int, max_new_tokens: int) -> None:
    world = world_of("3", depth=depth)
    world.submit(submit_of(1, [5] * 6, limits=Limits(max_new_tokens)))
    world.run()
    assert world.ended[1].code is FinishCode.LENGTH
    assert world.core.scheduler.stats(0.0).output_tokens == max_new_tokens
    ends = [row.start + row.count for plan in world.runner.plans for row in plan.rows]
    assert max(ends) < 6 + max_new_tokens
    world.check_all_over()


@DEPTHS
def test_tokens_after_a_stop_token_inside_a_draft_are_dropped(depth: int) -> None:
    plain = world_of("0", max_drafts=0)
    plain.submit(submit_of(1, [5] * 6, limits=Limits(16)))
    plain.run()
    output = plain.outputs[1]
    index = next(index for index in range(2, 5) if output[index] not in output[:index])
    world = world_of("3", depth=depth)
    world.submit(submit_of(1, [5] * 6, limits=Limits(16, stop_token_ids=(output[index],))))
    world.run()
    assert world.outputs[1] == output[: index + 1]
    assert (world.ended[1].code, world.ended[1].matched) == (FinishCode.STOP, output[index])
    assert world.core.scheduler.stats(0.0).output_tokens == index + 1
    world.check_all_over()


@DEPTHS
def test_drafts_preempt_no_request(depth: int) -> None:
    world = world_of("0", depth=depth, num_pages=8, prefix_cache=False)
    world.submit(*(submit_of(uid, [5] * 6, limits=Limits(10)) for uid in (1, 2)))
    world.run()
    assert not world.preempted
    assert any(row.num_drafts for plan in world.runner.plans for row in plan.rows)
    world.check_all_over()


def test_forced_tokens_wait_for_drafts_in_flight() -> None:
    world = World(
        settings_of(depth=1, max_drafts=2),
        64,
        page_size=4,
        model=FakeModel(vocab_size=50, accepts="0", tokens_per_step="19"),
    )
    world.submit(submit_of(1, [5] * 6, limits=Limits(30)))
    world.run()
    rows = [row for plan in world.runner.plans for row in plan.rows]
    assert any(len(row.token_ids) > 2 and row.num_drafts == 2 for row in rows[1:])
    world.check_all_over()


@DEPTHS
def test_rejected_drafts_leave_pages_with_their_request(depth: int) -> None:
    world = world_of("0", depth=depth)
    world.submit(submit_of(1, [5] * 6, limits=Limits(30)))
    most = 0
    while world.core.has_work:
        world.step()
        for request in world.core.requests.running:
            unused = request.allocation.capacity - len(request.token_ids)
            most = max(most, unused)
    assert most <= 4 + (1 + depth) * 4
    assert sum(len(row.new_pages) for plan in world.runner.plans for row in plan.rows) <= (6 + 30 + 3) // 4
    world.check_all_over()


@pytest.mark.parametrize("depth", [0, 1])
def test_only_rows_with_a_repeated_ngram_have_drafts(depth: int) -> None:
    world = World(settings_of(depth=depth, max_drafts=3, has_ngrams=True), 64, page_size=4, model=ZEROS)
    image = Media(3, 4, 4, b"digest", "")
    for uid, prompt in {1: [0, 0, 0], 2: [*range(20, 30)], 3: [0, 0, 0, 9, 9, 9, 9, 0, 0]}.items():
        submit = submit_of(uid, prompt, limits=Limits(2 if uid == 2 else 12))
        world.submit(replace(submit, media=[image] if uid == 3 else []))
    world.run()
    rows = [row for plan in world.runner.plans for row in plan.rows if not row.token_ids]
    assert {row.uid for row in rows if row.num_drafts} == {1, 3}
    for row in rows:
        assert row.count == 1 + row.num_drafts
        assert row.drafts == [0] * row.num_drafts  # and no key of an image
