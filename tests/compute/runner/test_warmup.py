"""Warm-up runs steps of all kinds, and does not affect later requests."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import Tensor

from aioengine.layers.linear import Linear
from aioengine.protocol.messages import Progress
from aioengine.runner import warmup
from aioengine.runner.build import build
from aioengine.runner.model_runner import ModelRunner
from aioengine.runner.ticket import Ticket
from aioengine.runner.warmup import WarmupLimits, run_warmup_steps
from aioengine.scheduler.plan import NOTHING, TOKENS, StepPlan, StepResult
from tests.compute.runner_world import World, make_settings, save_model


@pytest.fixture
def world(tmp_path: Path) -> World:
    save_model("llama", tmp_path)
    settings = make_settings(tmp_path)
    return World(
        msgspec.structs.replace(settings, scheduler=msgspec.structs.replace(settings.scheduler, max_running=64))
    )


class Watch:
    """Records the plans and results of a runner."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        launch, collect = runner.launch, runner.collect

        def launch_and_note(plan: StepPlan) -> Ticket:
            self.plans.append(plan)
            return launch(plan)

        def collect_and_note(ticket: Ticket) -> StepResult:
            self.results.append(collect(ticket))
            return self.results[-1]

        monkeypatch.setattr(runner, "launch", launch_and_note)
        monkeypatch.setattr(runner, "collect", collect_and_note)


def test_warmup_runs_all_kinds_of_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, reports = Watch(world.runner, monkeypatch), list[Progress]()
    run_warmup_steps(world.runner, WarmupLimits(64, 256, 256, 256), reports.append)
    shapes = {tuple(row.count for row in plan.rows) for plan in watch.plans}
    for size in (1, 2, 16, 17, 32, 33, 64):
        assert {(1,) * size, (size,), (1,) * (size // 2) + (3,) * (size - size // 2)} <= shapes
    silent = {tuple(row.outputs for row in plan.rows) for plan in watch.plans}
    assert {(NOTHING,), (TOKENS, NOTHING), (TOKENS,) * 32 + (NOTHING,) * 32} <= silent
    assert (256 // 64,) * 64 in shapes
    assert max(len(plan.rows) for plan in watch.plans) == 64
    assert all(plan.num_tokens <= 256 for plan in watch.plans)
    assert not any(result.failed for result in watch.results)
    assert [(report.done, report.total) for report in reports] == [(done, 8) for done in range(9)]


@pytest.mark.parametrize(
    ("limits", "largest"),
    [(WarmupLimits(4, 256, 256, 256), 4), (WarmupLimits(64, 20, 256, 256), 17), (WarmupLimits(64, 256, 256, 5), 5)],
)
def test_warmup_stays_within_the_limits(
    world: World, limits: WarmupLimits, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(world.runner, monkeypatch)
    run_warmup_steps(world.runner, limits, lambda _: None)
    assert max(len(plan.rows) for plan in watch.plans) == largest
    assert all(plan.num_tokens <= limits.max_tokens for plan in watch.plans)
    used = {page for plan in watch.plans for opened in plan.new_rows for page in opened.pages}
    assert max(used) < limits.num_pages
    assert not any(result.failed for result in watch.results)


def test_no_warmup_for_a_very_short_context(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(world.runner, monkeypatch)
    run_warmup_steps(world.runner, WarmupLimits(64, 256, 4, 256), lambda _: None)
    assert watch.plans == []


def test_warmup_does_not_affect_later_requests(world: World, tmp_path: Path) -> None:
    prompts = [[5, 6, 7], list(range(1, 40)), [9]]
    expected = World(world.settings).answers(prompts)
    run_warmup_steps(world.runner, WarmupLimits(64, 256, 256, 256), lambda _: None)
    assert world.answers(prompts) == expected


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_all_matmuls_of_a_block_run_with_each_token_count(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(family, tmp_path)
    seen: list[tuple[int, ...]] = []
    plain = Linear.finish_loading

    def finish_loading(layer: Linear) -> None:
        shape = layer._tensors["weight"].shape
        plain(layer)
        matmul = layer._matmul
        assert matmul is not None

        def watched(x: Tensor) -> Tensor:
            seen.append((x.shape[0], *shape))
            return matmul(x)

        layer._matmul = watched

    monkeypatch.setattr(Linear, "finish_loading", finish_loading)
    runner = build(make_settings(tmp_path), lambda _: None)
    seen.clear()
    pool = runner._pools[0].tensors[0].clone()
    warmup.load_kernels(runner._model, (7, 300))
    shapes = (128, 64), (64, 64), (192, 64), (64, 96)  # q, k and v; output; gate and up; down
    assert seen == [(num_tokens, *shape) for num_tokens in (7, 300) for shape in shapes]
    assert torch.equal(runner._pools[0].tensors[0], pool)
    runner.close()


def test_token_counts_of_steps_without_graphs() -> None:
    assert list(warmup.token_counts(700, 622)) == [700, 669, 638]
    assert list(warmup.token_counts(8192, 8192)) == []
    assert max(warmup.token_counts(131_072, 0)) == 8192, "a start must not take minutes"


def test_no_garbage_is_collected_while_graphs_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def prompt_graphs(_: object) -> None:
        seen.append(gc.isenabled())
        raise RuntimeError("no device")

    monkeypatch.setattr(warmup, "_prompt_graphs", prompt_graphs)
    runner, parts = SimpleNamespace(), SimpleNamespace(attention=None)
    with pytest.raises(RuntimeError, match="no device"):
        warmup.capture_graphs(runner, parts, lambda _: None)  # type: ignore[arg-type]
    assert (seen, gc.isenabled()) == ([False], True)
