"""Random arrivals, aborts, deadlines and preemptions: equal tokens, one end for each, no page lost."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.protocol.messages import FinishCode, Submit
from aioengine.testing.faults import Faults
from tests.core.core_world import World, random_requests, settings_of


@dataclass(frozen=True)
class Storm:
    """The sizes of a random workload and its world."""

    seed: int
    page_size: int
    pool_tokens: int
    max_running: int
    chunk_tokens: int
    policy: str
    prefix_cache: bool

    def world(self, depth: int, faults: Faults | None = None, num_ranks: int = 1) -> World:
        return World(
            settings_of(
                max_running=self.max_running,
                chunk_tokens=self.chunk_tokens,
                context_length=self.pool_tokens,
                policy=self.policy,
                prefix_cache=self.prefix_cache,
                depth=depth,
            ),
            num_pages=max(2, self.pool_tokens // self.page_size),
            page_size=self.page_size,
            faults=faults,
            num_ranks=num_ranks,
        )

    def requests(self, rng: random.Random) -> list[Submit]:
        """Return requests with up to half of the pool for the prompt and half for the output. Few fit together."""
        half = max(2, self.pool_tokens // self.page_size) * self.page_size // 2
        return random_requests(rng, count=24, max_prompt=min(half, 120), max_output=min(half, 60))


storms = st.builds(
    Storm,
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([1, 3, 4, 16]),
    pool_tokens=st.sampled_from([48, 96, 256, 1024]),
    max_running=st.sampled_from([1, 3, 16]),
    chunk_tokens=st.sampled_from([1, 7, 32, 256]),
    policy=st.sampled_from(["fcfs", "priority", "longest_prefix"]),
    prefix_cache=st.booleans(),
)


with_ranks = pytest.mark.parametrize(
    ("depth", "num_ranks"),
    [(0, 1), (1, 1), (2, 1), (1, 2), *(pytest.param(depth, 2, marks=pytest.mark.slow) for depth in (0, 2))],
)


@with_ranks
@given(storm=storms)
def test_random_workloads_give_the_reference_tokens(depth: int, num_ranks: int, storm: Storm) -> None:
    rng = random.Random(storm.seed)
    world = storm.world(depth, num_ranks=num_ranks)
    waiting = storm.requests(rng)
    while waiting or world.core.has_work:
        while waiting and rng.random() < 0.4:
            world.submit(waiting.pop())
        world.step()
    assert {ended.code for ended in world.ended.values()} <= {FinishCode.STOP, FinishCode.LENGTH}
    world.check_all_over()


@with_ranks
@given(storm=storms)
def test_aborts_and_deadlines_in_random_workloads_leak_no_pages(depth: int, num_ranks: int, storm: Storm) -> None:
    rng = random.Random(storm.seed)
    world = storm.world(depth, num_ranks=num_ranks)
    waiting = [_with_deadlines(submit, rng) for submit in storm.requests(rng)]
    while waiting or world.core.has_work:
        while waiting and rng.random() < 0.4:
            world.submit(waiting.pop())
        if rng.random() < 0.1 and world.submitted:
            code = rng.choice([FinishCode.ABORT, FinishCode.STOP, FinishCode.SHUTDOWN])
            living = sorted(world.submitted.keys() - world.ended.keys() - world.stopped)
            world.abort(rng.sample(living, min(len(living), rng.randint(0, 3))), code)
        if rng.random() < 0.02:
            world.core.scheduler.cache.clear()
        world.step()
    for ended in world.ended.values():
        if ended.code is FinishCode.DEADLINE:
            assert ended.matched in {"total", "queue", "first_token"}
    world.check_all_over()


@pytest.mark.parametrize("depth", [0, 1, 2])
@given(storm=storms, launch=st.integers(1, 60), collect=st.integers(1, 60), row=st.integers(1, 60))
def test_a_step_that_fails_ends_only_its_own_requests(
    depth: int, storm: Storm, launch: int, collect: int, row: int
) -> None:
    rng = random.Random(storm.seed)
    world = storm.world(depth, Faults(raise_at=launch, collect_raise_at=collect, fail_row_at=row))
    waiting = storm.requests(rng)
    while waiting or world.core.has_work:
        while waiting and rng.random() < 0.3:
            world.submit(waiting.pop())
        world.step()
    failed = {uid for uid, ended in world.ended.items() if ended.code is FinishCode.FAILED}
    in_failed_steps = {entry.uid for number in (launch, collect, row) for entry in world.rows_of(number)}
    assert failed <= in_failed_steps
    world.check_all_over()


def _with_deadlines(submit: Submit, rng: random.Random) -> Submit:
    kinds = ["total", "queue", "first_token"]
    times = {kind: rng.uniform(0.0, 120.0) for kind in kinds if rng.random() < 0.2}
    return msgspec.structs.replace(submit, limits=msgspec.structs.replace(submit.limits, deadlines=times))


def test_every_overlap_depth_gives_the_same_tokens_under_preemption() -> None:
    outputs: list[dict[int, list[int]]] = []
    for depth in (0, 1, 2):
        storm = Storm(7, 4, 96, 16, 32, "fcfs", True)
        world = storm.world(depth)
        world.submit(*storm.requests(random.Random(7)))
        world.run()
        assert world.core.scheduler.stats(world.now).num_preemptions > 0
        world.check_all_over()
        outputs.append(world.outputs)
    assert outputs[0] == outputs[1] == outputs[2]
