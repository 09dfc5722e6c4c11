"""Models with states: each request starts with the state of exactly the tokens that it does not compute."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.protocol.messages import FinishCode, Limits
from aioengine.scheduler.core import SchedulerCore
from aioengine.scheduler.request import Gate
from aioengine.scheduler.scheduler import Scheduler
from aioengine.testing.fake_runner import FakeRunner, FakeTicket
from aioengine.testing.faults import Faults
from tests.core.core_world import MODEL, NO_EOS, WatchedRunner, World, random_requests, settings_of, submit_of
from tests.kit.integrity import check_scheduler

if TYPE_CHECKING:
    from aioengine.scheduler.plan import StepPlan


class StateRunner(WatchedRunner):
    """A FakeRunner that records the tokens in the state of each request and snapshot."""

    def __init__(self, runner: FakeRunner) -> None:
        super().__init__(runner, gives_one=True)
        self.seen: dict[int, list[int]] = {}
        self.snapshots: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}

    def launch(self, plan: StepPlan) -> FakeTicket:
        for uid in plan.closed:
            self.seen.pop(uid, None)
        for new in plan.new_rows:
            state = self.snapshots[new.snapshot] if new.snapshot >= 0 else []
            assert state == new.token_ids[: len(state)]
            self.seen[new.uid] = list(state)
        last = {uid: row.last_token for uid, row in self._runner._rows.items()}
        ticket = super().launch(plan)
        for row in plan.rows:
            state = self.seen[row.uid]
            assert len(state) == row.start, "its state is that of other tokens"
            token = last.get(row.uid)
            held = [] if len(row.token_ids) == row.count or token is None else [token]
            state += [*row.token_ids, *held]
            assert len(state) == row.start + row.count
            self.computed[row.uid] = self.computed.get(row.uid, 0) + row.count
        for uid, snapshot_id in plan.snapshots:
            self.snapshots[snapshot_id] = list(self.seen[uid])
        return ticket


@dataclass
class StateWorld(World):
    """A world with snapshots."""

    num_snapshots: int = 8
    states: StateRunner = field(init=False)

    def __post_init__(self) -> None:
        runner = FakeRunner(self.model, num_pages=self.num_pages, page_size=self.page_size, faults=self.faults)
        self.runner = self.states = StateRunner(runner)
        self.scheduler = Scheduler(
            self.settings, num_pages=self.num_pages, page_size=self.page_size, num_snapshots=self.num_snapshots
        )
        self.core = SchedulerCore(self.scheduler, self.runner, self.settings.depth)

    def answer(self, uid: int, prompt: list[int], num_output: int = 8) -> tuple[list[int], int]:
        """Compute one request. Return its tokens, and the number of cached tokens."""
        self.submit(submit_of(uid, prompt, limits=Limits(max_new_tokens=num_output)))
        self.run()
        return self.outputs[uid], self.opened[uid].first_token.num_cached


def world_of(*, num_snapshots: int = 8, num_pages: int = 64, page_size: int = 4, depth: int = 0) -> StateWorld:
    """Return a world with snapshots at multiples of 8 tokens."""
    settings = settings_of(snapshot_tokens=8, chunk_tokens=64, max_running=8, depth=depth)
    return StateWorld(settings, num_pages, page_size, NO_EOS, num_snapshots=num_snapshots)


PROMPT = list(range(1, 31))


@dataclass(frozen=True)
class Storm:
    """The sizes of a random workload and its world."""

    seed: int
    page_size: int
    span_pages: int
    num_snapshots: int
    pool_tokens: int
    max_running: int
    chunk_tokens: int

    def world(self, depth: int, faults: Faults | None = None) -> StateWorld:
        settings = settings_of(
            snapshot_tokens=self.span_pages * self.page_size,
            max_running=self.max_running,
            chunk_tokens=self.chunk_tokens,
            context_length=self.pool_tokens,
            policy=random.Random(self.seed).choice(["fcfs", "priority", "longest_prefix"]),
            depth=depth,
        )
        num_pages = max(2, self.pool_tokens // self.page_size)
        return StateWorld(settings, num_pages, self.page_size, MODEL, faults, num_snapshots=self.num_snapshots)


storms = st.builds(
    Storm,
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([1, 3, 4, 16]),
    span_pages=st.integers(1, 4),
    num_snapshots=st.sampled_from([0, 1, 3, 20]),
    pool_tokens=st.sampled_from([48, 96, 256, 1024]),
    max_running=st.sampled_from([1, 3, 16]),
    chunk_tokens=st.sampled_from([1, 7, 32, 256]),
)


@pytest.mark.parametrize("depth", [0, 1, 2])
@given(storm=storms, fault=st.integers(0, 60))
def test_random_workloads_give_the_reference_tokens(depth: int, storm: Storm, fault: int) -> None:
    rng = random.Random(storm.seed)
    faults = Faults(raise_at=fault, collect_raise_at=fault + 9, fail_row_at=fault + 5) if fault else None
    world = storm.world(depth, faults)
    half = max(2, storm.pool_tokens // storm.page_size) * storm.page_size // 2
    waiting = random_requests(rng, count=20, max_prompt=min(half, 120), max_output=min(half, 60))
    for submit in waiting:
        submit.session = rng.choice([0, 0, 1, 2])
        submit.cache_salt = rng.choice(["", "", "", "a"])
    while waiting or world.core.has_work:
        while waiting and rng.random() < 0.4:
            world.submit(waiting.pop())
        living = sorted(world.submitted.keys() - world.ended.keys() - world.stopped)
        if rng.random() < 0.1:
            world.abort(rng.sample(living, min(len(living), rng.randint(0, 3))), FinishCode.ABORT)
        if living and rng.random() < 0.05:
            held = rng.sample(living, 1)
            world.close_gate(held, Gate.SUSPENDED)
            world.step()
            world.open_gate(held, Gate.SUSPENDED)
        if rng.random() < 0.02:
            world.core.scheduler.cache.clear()
        world.step()
    for session in (1, 2):
        world.core.requests.close_session(session)
    world.check_all_over()
    check_scheduler(world.core.scheduler)
    snapshots = world.scheduler.cache.snapshots
    assert snapshots is None or len(snapshots._ids) == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_the_same_prompt_is_computed_from_its_last_snapshot(depth: int) -> None:
    world = world_of(depth=depth)
    first, num_cached = world.answer(1, PROMPT)
    assert num_cached == 0
    second, num_cached = world.answer(2, PROMPT)
    assert second == first
    assert num_cached == 24
    assert world.states.computed[2] == len(PROMPT) + 8 - 1 - 24


def test_a_short_prompt_takes_no_further_step_until_it_is_sent_again() -> None:
    world = world_of()
    results = [world.answer(uid, PROMPT[:14], 1)[1] for uid in range(3)]
    assert results == [0, 0, 8]
    assert [[row.count for row in plan.rows] for plan in world.runner.plans] == [[14], [8], [6], [6]]


def test_the_next_turn_starts_after_the_answer() -> None:
    world = world_of()
    answer, _ = world.answer(1, PROMPT, 20)
    _, num_cached = world.answer(2, [*PROMPT, *answer, 1, 2, 3])
    assert num_cached == 48


def test_repeated_prefix_gets_a_snapshot() -> None:
    world = world_of()
    results = [world.answer(uid, [*PROMPT[:17], *[40 + uid] * 20])[1] for uid in range(4)]
    assert results == [0, 0, 16, 16]


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_with_a_shared_prefix_wait_for_its_snapshot(depth: int) -> None:
    world = world_of(depth=depth)
    world.submit(*(submit_of(uid, [*PROMPT[:17], *[40 + uid] * 20]) for uid in range(6)))
    world.run()
    assert [world.opened[uid].first_token.num_cached for uid in range(6)] == [0, 16, 16, 16, 16, 16]


def test_answers_to_one_prompt_share_its_computation() -> None:
    world = world_of()
    world.submit(*(submit_of(uid, PROMPT, temperature=1.0) for uid in range(6)))
    world.run()
    assert [world.opened[uid].first_token.num_cached for uid in range(6)] == [0, 24, 24, 24, 24, 24]


def test_a_preempted_request_resumes_from_its_newest_snapshot() -> None:
    world = world_of(num_pages=22)
    world.submit(*(submit_of(uid, [uid] * 12, limits=Limits(max_new_tokens=20)) for uid in range(2)))
    world.submit(submit_of(2, [2] * 12, limits=Limits(max_new_tokens=60)))
    world.run()
    assert world.preempted == [2]
    resumed = [new for plan in world.runner.plans for new in plan.new_rows if len(new.token_ids) > new.num_prompt]
    assert any(new.snapshot >= 0 for new in resumed)
    world.check_all_over()


def test_the_snapshot_unused_for_longest_is_replaced() -> None:
    world = world_of(num_snapshots=2)
    prompts = [[uid] * 20 for uid in range(3)]
    for uid, prompt in enumerate(prompts[:2]):
        world.answer(uid, prompt, 2)
    assert world.answer(2, prompts[0], 2)[1] == 16
    world.answer(3, prompts[2], 2)
    assert world.answer(4, prompts[0], 2)[1] == 16
    assert world.answer(5, prompts[1], 2)[1] == 0


def test_snapshots_of_sessions_outlast_others() -> None:
    world = world_of(num_snapshots=2)
    submit = submit_of(0, [7] * 20, limits=Limits(max_new_tokens=2))
    submit.session = 5
    world.submit(submit)
    world.run()
    for uid in range(1, 5):
        world.answer(uid, [uid] * 20, 2)
    assert world.answer(9, [7] * 20, 2)[1] == 16


def test_without_snapshots_nothing_is_reused() -> None:
    world = world_of(num_snapshots=0)
    assert [world.answer(uid, PROMPT)[1] for uid in range(2)] == [0, 0]
