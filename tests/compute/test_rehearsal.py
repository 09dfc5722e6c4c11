"""Rehearsed steps: of every form that fits, leaving nothing behind."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from aioengine.protocol.messages import Progress
from aioengine.runner.model_runner import ModelRunner, Ticket
from aioengine.runner.rehearsal import Limits, rehearse
from aioengine.scheduler.plan import NOTHING, TOKENS, Plan, StepResult
from tests.compute.runner_world import World, make_settings, save_model


@pytest.fixture
def world(tmp_path: Path) -> World:
    save_model("llama", tmp_path)
    settings = make_settings(tmp_path)
    return World(
        msgspec.structs.replace(settings, scheduler=msgspec.structs.replace(settings.scheduler, max_running=64))
    )


class Watch:
    """What is launched on a runner, and what comes back."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[Plan] = []
        self.results: list[StepResult] = []
        launch, collect = runner.launch, runner.collect

        def launch_and_note(plan: Plan) -> Ticket:
            self.plans.append(plan)
            return launch(plan)

        def collect_and_note(ticket: Ticket) -> StepResult:
            self.results.append(collect(ticket))
            return self.results[-1]

        monkeypatch.setattr(runner, "launch", launch_and_note)
        monkeypatch.setattr(runner, "collect", collect_and_note)


def test_every_form_is_computed_and_nothing_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, reports = Watch(world.runner, monkeypatch), list[Progress]()
    rehearse(world.runner, Limits(64, 256, 256, 256), reports.append)
    shapes = {tuple(row.count for row in plan.rows) for plan in watch.plans}
    for size in (1, 2, 16, 17, 32, 33, 64):
        assert {(1,) * size, (size,), (1,) * (size // 2) + (3,) * (size - size // 2)} <= shapes
    silent = {tuple(row.gives for row in plan.rows) for plan in watch.plans}
    assert {(NOTHING,), (TOKENS, NOTHING), (TOKENS,) * 32 + (NOTHING,) * 32} <= silent
    assert (256 // 64,) * 64 in shapes
    assert max(len(plan.rows) for plan in watch.plans) == 64
    assert all(plan.num_tokens <= 256 for plan in watch.plans)
    assert not any(result.failed for result in watch.results)
    assert [(report.done, report.total) for report in reports] == [(done, 8) for done in range(9)]


@pytest.mark.parametrize(
    ("limits", "largest"),
    [(Limits(4, 256, 256, 256), 4), (Limits(64, 20, 256, 256), 17), (Limits(64, 256, 256, 5), 5)],
)
def test_within_the_limits(world: World, limits: Limits, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(world.runner, monkeypatch)
    rehearse(world.runner, limits, lambda _: None)
    assert max(len(plan.rows) for plan in watch.plans) == largest
    assert all(plan.num_tokens <= limits.max_tokens for plan in watch.plans)
    used = {page for plan in watch.plans for opened in plan.opened for page in opened.pages}
    assert max(used) < limits.num_pages
    assert not any(result.failed for result in watch.results)


def test_a_context_that_is_too_short_for_any(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(world.runner, monkeypatch)
    rehearse(world.runner, Limits(64, 256, 4, 256), lambda _: None)
    assert watch.plans == []


def test_requests_that_follow_see_nothing_of_it(world: World, tmp_path: Path) -> None:
    prompts = [[5, 6, 7], list(range(1, 40)), [9]]
    expected = World(world.settings).answers(prompts)
    rehearse(world.runner, Limits(64, 256, 256, 256), lambda _: None)
    assert world.answers(prompts) == expected
