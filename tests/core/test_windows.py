"""Requests of models with windows, under random arrivals: equal tokens, and no page is lost."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.protocol.messages import FinishCode, Limits, RequestKind
from aioengine.scheduler.request import Gate
from aioengine.settings.page_groups import PageGroups
from aioengine.testing.fake_runner import FakeModel
from aioengine.testing.faults import Faults
from tests.core.core_world import MODEL, NO_EOS, World, random_requests, settings_of, submit_of
from tests.kit.integrity import num_owned


@dataclass(frozen=True)
class Storm:
    """The size of a world. spare: pages in addition to the pages of one request of the context length."""

    seed: int
    windows: tuple[int | None, ...]
    page_size: int
    context_length: int
    spare: int
    max_running: int
    chunk_tokens: int
    prefix_cache: bool

    def world(self, depth: int, model: FakeModel = MODEL, faults: Faults | None = None) -> World:
        settings = settings_of(
            max_running=self.max_running,
            chunk_tokens=self.chunk_tokens,
            context_length=self.context_length,
            prefix_cache=self.prefix_cache,
            depth=depth,
        )
        groups = PageGroups(windows=self.windows, page_size=self.page_size)
        return World(
            settings,
            num_pages=groups.pages_for(self.context_length) + self.spare,
            page_size=self.page_size,
            model=model,
            faults=faults,
            windows=self.windows,
        )


storms = st.builds(
    Storm,
    seed=st.integers(0, 2**32),
    windows=st.sampled_from([(1,), (5,), (None, 3), (None, 16, 16), (None, 20, 7)]),
    page_size=st.sampled_from([1, 3, 4, 16]),
    context_length=st.sampled_from([40, 96]),
    spare=st.sampled_from([0, 0, 5, 40, 200]),
    max_running=st.sampled_from([1, 3, 16]),
    chunk_tokens=st.sampled_from([1, 7, 32, 256]),
    prefix_cache=st.booleans(),
)


@pytest.mark.parametrize("depth", [0, 1, 2])
@given(storm=storms, tokens_per_step=st.sampled_from(["1", "1", "132", "1111231"]), aborts=st.booleans())
def test_random_workloads_give_the_reference_tokens(
    depth: int, storm: Storm, tokens_per_step: str, aborts: bool
) -> None:
    rng = random.Random(storm.seed)
    model = FakeModel(vocab_size=50, eos_token_id=3, eos_probability=0.02, tokens_per_step=tokens_per_step)
    world = storm.world(depth, model)
    half = storm.context_length // 2
    waiting = random_requests(rng, count=10, max_prompt=half, max_output=half)
    for submit in waiting:
        submit.session, submit.cache_salt = rng.choice([0, 0, 1, 2]), rng.choice(["", "", "a"])
    num_steps = 0
    while waiting or world.core.has_work:
        while waiting and rng.random() < 0.4:
            world.submit(waiting.pop())
        if aborts and rng.random() < 0.1:
            living = sorted(world.submitted.keys() - world.ended.keys() - world.stopped)
            world.abort(rng.sample(living, min(len(living), rng.randint(0, 2))), FinishCode.ABORT)
        if aborts and rng.random() < 0.02:
            world.core.scheduler.cache.clear()
        if aborts and rng.random() < 0.05:
            held = rng.sample(sorted(world.submitted), min(len(world.submitted), 1))
            world.close_gate(held, Gate.SUSPENDED)
            world.step()
            world.open_gate(held, Gate.SUSPENDED)
        world.step()
        num_steps += 1
        assert num_steps < 20_000
    for session in (1, 2):
        world.core.requests.close_session(session)
    world.check_all_over()


@pytest.mark.parametrize("depth", [0, 1])
@given(storm=storms, launch=st.integers(1, 40), collect=st.integers(1, 40), row=st.integers(1, 40))
def test_a_step_that_fails_leaks_no_pages(depth: int, storm: Storm, launch: int, collect: int, row: int) -> None:
    rng = random.Random(storm.seed)
    world = storm.world(depth, faults=Faults(raise_at=launch, collect_raise_at=collect, fail_row_at=row))
    half = storm.context_length // 2
    world.submit(*random_requests(rng, count=10, max_prompt=half, max_output=half))
    world.run()
    world.check_all_over()


def test_a_long_request_keeps_only_the_pages_in_its_window() -> None:
    world = World(settings_of(chunk_tokens=32), num_pages=40, page_size=4, model=NO_EOS, windows=(16,))
    world.submit(submit_of(0, list(range(50)) * 8, limits=Limits(max_new_tokens=200)))
    most = 0
    while world.core.has_work:
        world.step()
        most = max([most, *(num_owned(request.allocation) for request in world.core.requests.running)])
    world.check_all_over()
    assert most <= (16 + 32) // 4 + 2


def test_more_long_requests_fit_with_windows() -> None:
    world = World(settings_of(chunk_tokens=64), num_pages=100, page_size=4, model=NO_EOS, windows=(16,))
    world.submit(*(submit_of(uid, [uid, *range(200)], limits=Limits(max_new_tokens=100)) for uid in range(10)))
    most = 0
    while world.core.has_work:
        world.step()
        most = max(most, len(world.core.requests.running))
    world.check_all_over()
    assert most == 10
    assert not world.preempted


def test_a_shared_prompt_is_reused_after_its_first_user_moved_on() -> None:
    world = World(settings_of(chunk_tokens=64), num_pages=400, page_size=4, model=NO_EOS, windows=(None, 8))
    prompt = list(range(50)) * 2
    world.submit(submit_of(0, [*prompt, 1, 2, 3], limits=Limits(max_new_tokens=60)))
    for _ in range(40):
        world.step()
    world.submit(submit_of(1, [*prompt, 4, 5, 6]))
    world.run()
    assert world.opened[1].first_token.num_cached == 100
    world.check_all_over()


def test_a_hit_is_cut_back_to_where_the_window_has_its_pages() -> None:
    world = World(settings_of(chunk_tokens=64), num_pages=80, page_size=4, model=NO_EOS, windows=(None, 8))
    prompt = list(range(50)) * 2
    world.submit(submit_of(0, prompt, limits=Limits(max_new_tokens=20)))
    world.run()
    cache = world.core.scheduler.cache
    num_cached = len(cache.match([*prompt, 9]).path)
    assert num_cached == 25
    for num_pages in range(1, 81):
        cache.evict(1)
        now_cached = len(cache.match([*prompt, 9]).path)
        assert now_cached <= num_cached, num_pages
        num_cached = now_cached
    assert num_cached == 0
    world.submit(submit_of(1, [*prompt, 9]))
    world.run()
    world.check_all_over()


def test_prompts_that_are_not_divided_wait_for_all_their_pages() -> None:
    settings = settings_of(chunk_tokens=32, context_length=100, prefix_cache=False, splits_prompts=False)
    world = World(settings, num_pages=30, page_size=4, model=NO_EOS, windows=(8,))
    pooled = (submit_of(uid, [uid] * (17 * uid + 10)) for uid in range(6))
    world.submit(*(msgspec.structs.replace(submit, kind=RequestKind.POOL) for submit in pooled))
    world.run()
    world.check_all_over()
    assert sorted(row.count for plan in world.runner.plans for row in plan.rows) == [17 * uid + 10 for uid in range(6)]


def test_admission_of_many_requests_takes_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    num_calls, pages_for = [0], PageGroups.pages_for

    def counted(groups: PageGroups, num_tokens: int) -> int:
        num_calls[0] += 1
        return pages_for(groups, num_tokens)

    monkeypatch.setattr(PageGroups, "pages_for", counted)
    world = World(settings_of(max_running=100, chunk_tokens=1000), 10_000, 4, NO_EOS, windows=(None, 8))
    world.submit(*(submit_of(uid, [uid % 50, uid // 50, *range(8)]) for uid in range(100)))
    world.step()
    assert len(world.core.requests.running) == 100
    assert num_calls[0] < 10 * 100


def test_a_request_without_a_row_survives_a_launch_that_fails() -> None:
    world = World(settings_of(chunk_tokens=256), 8, 2, NO_EOS, Faults(raise_at=1), windows=(1,))
    world.submit(submit_of(0, list(range(46))), submit_of(1, [1, 2]))
    world.run()
    assert [new.uid for new in world.runner.plans[0].new_rows] == [0, 1]
    assert [row.uid for row in world.runner.plans[0].rows] == [0]
    assert (world.ended[0].code, world.ended[1].code) == (FinishCode.FAILED, FinishCode.LENGTH)
    world.check_all_over()
