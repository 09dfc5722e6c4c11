"""Behavior of SchedulerCore."""

from __future__ import annotations

import msgspec
import pytest

from aioengine.protocol.messages import End, FinishCode, Limits, StepOutput
from aioengine.scheduler.core import MAX_FAILURES, SchedulerCore
from aioengine.scheduler.deadlines import SPARE_ENTRIES
from aioengine.scheduler.plan import NOTHING, TOKENS, StepPlan
from aioengine.scheduler.scheduler import Scheduler
from aioengine.settings.config import SchedulerSettings
from aioengine.testing.fake_runner import FakeRunner, FakeTicket
from aioengine.testing.faults import Faults, InjectedFault
from tests.core.core_world import MODEL, World, settings_of, small_world, submit_of
from tests.kit.integrity import check_scheduler

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def code_of(world: World, uid: int) -> tuple[FinishCode, int | str | None]:
    return world.ended[uid].code, world.ended[uid].matched


# ------------------------------------------------------------ steps


def test_an_idle_core_has_nothing_to_do() -> None:
    world = small_world()
    assert not world.core.has_work
    assert world.step() is None
    assert world.core.requests.next_deadline() is None


def test_depth_is_the_number_of_steps_in_flight_before_the_newest() -> None:
    for depth in (0, 1, 2):
        world = small_world(depth=depth)
        world.submit(submit_of(1, [1, 2, 3]))
        outputs = [world.step() for _ in range(depth + 1)]
        assert outputs[:-1] == [None] * depth
        assert outputs[-1] is not None
        assert len(world.runner.plans) == depth + 1


def test_the_first_output_of_a_request_opens_it() -> None:
    world = small_world(chunk_tokens=4)
    world.now = 5.0
    world.submit(submit_of(1, list(range(10)), limits=Limits(max_new_tokens=2)))
    outputs = [world.step() for _ in range(4)]
    assert [output.tokens.uids if output else None for output in outputs] == [[], [], [1], [1]]
    third, fourth = outputs[2], outputs[3]
    assert third is not None
    assert fourth is not None
    assert [msgspec.structs.astuple(request.first_token) for request in third.opened] == [
        (1, 0, 5.0, 7.0, "default", None)
    ]
    assert fourth.ended == [End(1, FinishCode.LENGTH)]


def test_first_tokens_are_timed_by_the_clock_after_the_step() -> None:
    settings = settings_of()
    runner = FakeRunner(MODEL, num_pages=8, page_size=4)
    core: SchedulerCore[FakeTicket] = SchedulerCore(
        Scheduler(settings, num_pages=8, page_size=4), runner, 0, clock=lambda: 77.0
    )
    core.requests.submit(submit_of(1, [1, 2]))
    output = core.step(70.0)
    assert output is not None
    assert (output.opened[0].first_token.admitted_at, output.opened[0].first_token.first_token_at) == (70.0, 77.0)
    assert core.scheduler.stats(78.0).step_ended_at == 77.0


def test_plans_survive_encoding_and_decoding() -> None:
    world = small_world(num_pages=30)
    world.submit(*[submit_of(uid, [uid, 1, 2], limits=Limits(max_new_tokens=60)) for uid in range(4)])
    world.run()
    codec = msgspec.msgpack.Decoder(StepPlan)
    assert any(plan.closed for plan in world.runner.plans)
    for plan in world.runner.plans:
        assert codec.decode(msgspec.msgpack.encode(plan)) == plan


def test_planning_is_deterministic() -> None:
    plans: list[list[StepPlan]] = []
    for _ in range(2):
        world = small_world(num_pages=30, depth=1)
        world.submit(*[submit_of(uid, [1] * uid + [2], limits=Limits(max_new_tokens=40)) for uid in range(9)])
        world.run()
        plans.append(world.runner.plans)
    assert plans[0] == plans[1]


def test_decode_rows_come_first_and_carry_no_tokens() -> None:
    world = small_world(chunk_tokens=8, num_pages=200)
    world.submit(submit_of(1, [1, 2], limits=Limits(max_new_tokens=50)))
    world.step()
    world.submit(submit_of(2, [3] * 300))
    for _ in range(10):
        world.step()
        first, second = world.runner.plans[-1].rows
        assert (first.uid, first.count, first.token_ids, first.outputs) == (1, 1, [], TOKENS)
        assert (second.uid, second.count, second.outputs) == (2, 7, NOTHING)


def test_decode_cost_is_how_many_tokens_a_decode_row_counts_for() -> None:
    world = small_world(chunk_tokens=64, decode_cost=5, num_pages=2000)
    world.submit(*[submit_of(uid, [1, 2], limits=Limits(max_new_tokens=50)) for uid in range(6)])
    world.step()
    world.submit(submit_of(9, [3] * 300))
    world.step()
    assert [row.count for row in world.runner.plans[-1].rows] == [1] * 6 + [64 - 6 * 5]


def test_short_prompt_does_not_wait_for_a_long_prompt() -> None:
    world = small_world(chunk_tokens=64, num_pages=2000)
    world.submit(submit_of(1, [1] * 3000), submit_of(2, [2] * 3000), submit_of(3, [3] * 20, arrived_at=1.0))
    for _ in range(3):
        world.step()
    assert 3 in world.opened
    assert all(plan.num_tokens == 64 for plan in world.runner.plans[:2])


def test_short_prompt_is_not_split() -> None:
    world = small_world(chunk_tokens=320, num_pages=2000, max_running=32)
    world.submit(
        *[submit_of(uid, [uid] * 20) for uid in range(1, 16)], submit_of(16, [16] * 19), submit_of(17, [17] * 20)
    )
    world.step()
    assert [row.count for row in world.runner.plans[0].rows] == [20] * 15 + [19]
    world.step()
    assert [row.count for row in world.runner.plans[1].rows] == [1] * 16 + [20]


def test_short_prompt_is_split_rather_than_wait_for_long_prompts() -> None:
    world = small_world(chunk_tokens=320, decode_cost=50, num_pages=4000, max_running=16)
    world.submit(*[submit_of(uid, [uid] * 2, limits=Limits(max_new_tokens=100)) for uid in range(1, 7)])
    world.step()
    world.submit(submit_of(7, [7] * 3000), submit_of(8, [8] * 3000))
    world.step()
    world.submit(submit_of(9, [9] * 20))
    world.step()
    assert [row.count for row in world.runner.plans[-1].rows] == [1] * 6 + [20, 16, 4]


def test_only_a_few_prompts_are_partly_computed_at_a_time() -> None:
    world = small_world(chunk_tokens=512, num_pages=8000)
    world.submit(*[submit_of(uid, [uid] * 2000, arrived_at=uid) for uid in range(10)])
    world.submit(submit_of(99, [99] * 3, arrived_at=99.0))
    world.step()
    assert [row.uid for row in world.runner.plans[0].rows] == [0, 1, 2, 3, 99]
    world.run()
    assert list(world.ended) == [99, *range(10)]
    world.check_all_over()


# ------------------------------------------------------------ ends


def test_a_request_that_can_never_fit_is_refused_and_others_run() -> None:
    world = small_world(context_length=128)
    world.submit(
        submit_of(1, [1] * 5000),
        submit_of(2, [1, 2]),
        submit_of(3, [1] * 128),
        submit_of(4, [1] * 127),
    )
    world.run()
    assert [world.ended[uid].code for uid in (1, 2, 3, 4)] == [
        FinishCode.TOO_LARGE,
        FinishCode.LENGTH,
        FinishCode.TOO_LARGE,
        FinishCode.LENGTH,
    ]
    assert "128" in world.ended[3].message
    assert len(world.outputs[4]) == 1
    stats = world.core.scheduler.stats(0.0)
    assert (stats.num_finished, stats.num_aborted) == (2, 2)


def test_aborting_unknown_uids_does_nothing() -> None:
    world = small_world()
    world.abort([5, 6])
    assert not world.core.has_work


@DEPTHS
@pytest.mark.parametrize("num_steps", range(7))
@pytest.mark.parametrize("code", [FinishCode.ABORT, FinishCode.STOP, FinishCode.SHUTDOWN, FinishCode.FAILED])
def test_an_abort_frees_all_pages_at_once_in_every_state(depth: int, num_steps: int, code: FinishCode) -> None:
    world = small_world(depth=depth, chunk_tokens=4, max_running=2)
    world.submit(*[submit_of(uid, [uid] * 10, limits=Limits(max_new_tokens=30)) for uid in range(4)])
    for _ in range(num_steps):
        world.step()
    world.core.requests.abort([0, 1, 2, 3], code, "why")
    assert world.core.scheduler.stats(0.0).num_free_pages == 64
    world.run()
    assert world.ended == ({} if code is FinishCode.STOP else world.ended)
    if code is not FinishCode.STOP:
        assert [(end.code, end.message) for end in world.ended.values()] == [(code, "why")] * 4
    check_scheduler(world.core.scheduler)


@DEPTHS
def test_a_running_request_keeps_its_text_at_the_deadline(depth: int) -> None:
    world = small_world(depth=depth)
    world.submit(submit_of(1, [1, 2], limits=Limits(max_new_tokens=99, deadlines={"total": 10.0})))
    assert world.core.requests.next_deadline() == 10.0
    world.run()
    assert code_of(world, 1) == (FinishCode.DEADLINE, "total")
    assert len(world.outputs[1]) == 10 - depth
    world.check_all_over()


def test_expired_waiting_requests_are_never_computed() -> None:
    world = small_world(max_running=1)
    world.submit(submit_of(1, [1], limits=Limits(max_new_tokens=20)))
    world.step()
    world.submit(
        submit_of(2, [2], limits=Limits(max_new_tokens=1, deadlines={"queue": 5.0})),
        submit_of(3, [3], limits=Limits(max_new_tokens=1, deadlines={"first_token": 6.0})),
        submit_of(4, [4], limits=Limits(max_new_tokens=1, deadlines={"total": 7.0})),
        submit_of(5, [5], limits=Limits(max_new_tokens=1, deadlines={"queue": 50.0})),
    )
    world.run()
    assert code_of(world, 2) == (FinishCode.DEADLINE, "queue")
    assert code_of(world, 3) == (FinishCode.DEADLINE, "first_token")
    assert code_of(world, 4) == (FinishCode.DEADLINE, "total")
    assert code_of(world, 5) == (FinishCode.LENGTH, None)
    assert {row.uid for plan in world.runner.plans for row in plan.rows} == {1, 5}
    world.check_all_over()


# ------------------------------------------------------------ failures


def run_with_arrivals(world: World) -> None:
    for uid in range(10, 30):
        world.step()
        world.submit(submit_of(uid, [uid]))


@DEPTHS
@pytest.mark.parametrize("hook", ["raise_at", "collect_raise_at"])
@pytest.mark.parametrize("step", [1, 3])
def test_a_failed_step_ends_its_requests_and_later_requests_run(depth: int, hook: str, step: int) -> None:
    world = small_world(depth=depth, faults=Faults(**{hook: step}))
    world.submit(*[submit_of(uid, [uid, 1], limits=Limits(max_new_tokens=20)) for uid in range(3)])
    for _ in range(step + depth):
        world.step()
    world.submit(submit_of(9, [9, 1], limits=Limits(max_new_tokens=20)))
    world.run()
    for uid in range(3):
        assert world.ended[uid].code is FinishCode.FAILED
        assert world.ended[uid].stage == "forward"
        assert world.ended[uid].message.startswith("InjectedFault: ")
    assert world.ended[9].code is FinishCode.LENGTH
    world.check_all_over()


@DEPTHS
@pytest.mark.parametrize("hook", ["raise_at", "collect_raise_at"])
def test_repeated_step_failures_are_raised(depth: int, hook: str) -> None:
    world = small_world(depth=depth, faults=Faults(**{hook: 2, "raise_times": 99}))
    world.submit(*[submit_of(uid, [uid]) for uid in range(3)])
    with pytest.raises(InjectedFault):
        run_with_arrivals(world)
    assert len(world.runner.plans) >= MAX_FAILURES


def test_a_successful_step_resets_the_count_of_failures() -> None:
    world = small_world(faults=Faults(raise_at=2, raise_times=MAX_FAILURES - 1))
    for uid in range(12):
        world.submit(submit_of(uid, [uid], limits=Limits(max_new_tokens=2)))
        world.step()
    world.run()
    assert sum(ended.code is FinishCode.FAILED for ended in world.ended.values()) >= MAX_FAILURES - 1
    world.check_all_over()


def test_next_launch_closes_requests_after_a_failed_launch() -> None:
    world = small_world(faults=Faults(raise_at=4))
    world.submit(submit_of(1, [1], limits=Limits(max_new_tokens=3)), submit_of(2, [2], limits=Limits(max_new_tokens=9)))
    world.run()
    world.submit(submit_of(3, [3]))
    world.run()
    assert world.runner.plans[3].closed == [1]
    assert world.runner.plans[4].closed == [1, 2]
    world.check_all_over()


def test_a_failed_step_does_not_end_requests_that_were_preempted_since() -> None:
    submits = [submit_of(uid, [uid], limits=Limits(max_new_tokens=60)) for uid in range(3)]
    world = small_world(depth=1, num_pages=20)
    world.submit(*submits)
    while not world.preempted:
        world.step()
    preempted, step = world.preempted[0], len(world.runner.plans) - 1
    assert preempted in {row.uid for row in world.rows_of(step)}
    world = small_world(depth=1, num_pages=20, faults=Faults(collect_raise_at=step))
    world.submit(*submits)
    world.run()
    assert {uid for uid, ended in world.ended.items() if ended.code is FinishCode.LENGTH} == {preempted}
    world.check_all_over()


@DEPTHS
def test_a_failed_row_ends_only_its_request(depth: int) -> None:
    world = small_world(depth=depth, faults=Faults(fail_row_at=3))
    world.submit(*[submit_of(uid, [uid], limits=Limits(max_new_tokens=9)) for uid in range(3)])
    world.run()
    assert [world.ended[uid].code for uid in range(3)] == [FinishCode.FAILED, FinishCode.LENGTH, FinishCode.LENGTH]
    assert world.ended[0].stage == "sample"
    assert world.ended[0].message == "as asked for by fail_row_at=3"
    world.check_all_over()


def test_pages_of_a_failed_row_are_not_cached() -> None:
    world = small_world(chunk_tokens=8, faults=Faults(fail_row_at=5))
    world.submit(submit_of(1, [1] * 17, limits=Limits(max_new_tokens=1)))
    world.run()
    world.submit(submit_of(2, [1] * 16 + [2] * 13))
    world.run()
    world.submit(submit_of(3, [1] * 16 + [2] * 13))
    world.run()
    assert world.ended[2].code is FinishCode.FAILED
    assert world.opened[3].first_token.num_cached == 16
    world.check_all_over()


# ------------------------------------------------------------ control


@DEPTHS
def test_a_paused_core_launches_nothing_but_keeps_deadlines(depth: int) -> None:
    world = small_world(depth=depth)
    world.submit(
        submit_of(1, [1], limits=Limits(max_new_tokens=30)),
        submit_of(2, [2], limits=Limits(max_new_tokens=30, deadlines={"total": 8.0})),
    )
    for _ in range(4):
        world.step()
    world.core.is_paused = True
    num_plans = len(world.runner.plans)
    world.run()
    assert len(world.runner.plans) == num_plans
    assert len(world.outputs[1]) == num_plans
    world.now = world.core.requests.next_deadline() or 0.0
    world.step()
    assert code_of(world, 2) == (FinishCode.DEADLINE, "total")
    world.core.is_paused = False
    world.run()
    world.check_all_over()


def test_clearing_the_cache_drops_pages_that_no_request_uses() -> None:
    world = small_world()
    world.submit(submit_of(1, [1] * 9, limits=Limits(max_new_tokens=1)))
    world.run()
    world.submit(submit_of(2, [2] * 9, limits=Limits(max_new_tokens=50)))
    world.step()
    assert world.core.scheduler.stats(0.0).num_cached_pages == 4
    assert not world.core.scheduler.cache.clear()
    assert world.core.scheduler.stats(0.0).num_cached_pages == 2
    world.run()
    assert world.core.scheduler.cache.clear()
    assert world.core.scheduler.stats(0.0).num_cached_pages == 0
    world.check_all_over()


def test_stats_count_requests_tokens_and_pages() -> None:
    world = small_world(max_running=2)
    world.submit(*[submit_of(uid, [uid] * 5, limits=Limits(max_new_tokens=3)) for uid in range(3)])
    world.step()
    stats = world.core.scheduler.stats(9.0)
    assert (stats.sent_at, stats.num_running, stats.num_waiting, stats.num_steps) == (9.0, 2, 1, 1)
    assert (stats.num_pages, stats.num_free_pages) == (64, 60)
    world.run()
    stats = world.core.scheduler.stats(9.0)
    assert (stats.prompt_tokens, stats.output_tokens, stats.num_finished, stats.num_aborted) == (15, 9, 3, 0)
    assert stats.num_free_pages == 64


def test_outputs_survive_encoding_and_decoding() -> None:
    world = small_world()
    world.submit(submit_of(1, [1, 2], limits=Limits(max_new_tokens=1)))
    output = world.step()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=StepOutput) == output


def test_an_unknown_policy_is_refused() -> None:
    settings: SchedulerSettings = settings_of(policy="fastest")
    with pytest.raises(ValueError, match="no plug-in 'fastest'"):
        Scheduler(settings, num_pages=4, page_size=4)


def test_nothing_is_kept_of_thousands_of_ended_requests() -> None:
    world = small_world(max_running=8, prefix_cache=False)
    for uid in range(3000):
        limits = Limits(max_new_tokens=1 + uid % 3, deadlines={"total": 1e9, "queue": 1e9})
        world.submit(submit_of(uid, [uid % 50], limits=limits))
        world.step()
    world.run()
    life = world.scheduler.requests
    assert (life._requests, life.waiting, life.running) == ({}, [], [])
    assert len(life.deadlines.heap) <= SPARE_ENTRIES + 100
    assert len(life.closed) <= 8
    assert world.core.requests.next_deadline() is None
    assert not life.deadlines.heap
