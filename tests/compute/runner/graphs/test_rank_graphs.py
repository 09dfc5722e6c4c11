"""Decode graphs of several ranks on a CPU: steps that the ranks sample together, and steps that need all logits."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from aioengine.protocol.messages import Sampling
from tests.compute import rank_threads, runner_world
from tests.compute.rank_threads import ranked_world
from tests.compute.runner.test_rank_runner import PROMPTS, check_equal, compute, settings_of
from tests.compute.runner_world import World, save_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from aioengine.layers.ranks import RankGroup
    from aioengine.runner.model_runner import ModelRunner
    from aioengine.scheduler.plan import StepPlan
    from aioengine.settings.config import Settings


@pytest.mark.parametrize("can_sample", [False, True])
def test_answers_with_graphs_are_those_of_one_rank(
    can_sample: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0 knows which rows need more than a temperature."""
    pytest.importorskip("triton")
    from tests.compute import simulated_graphs as simulated

    def answer(world: World) -> World:
        """Answer requests of all kinds, then some that need only a temperature."""
        compute(world)
        for seed, prompt in enumerate(PROMPTS[:6]):
            world.submit(prompt, Sampling(seed, temperature=0.4 * (seed % 3)), max_new_tokens=20)
        world.run()
        return world

    save_model("llama", tmp_path)
    expected = answer(World(settings_of(tmp_path)))
    needs_logits: list[bool] = []

    class Kernels(simulated.Kernels):
        """Samples from the logits of all ranks. ranks: the group."""

        def __init__(self, *, num_embeddings: int, ranks: RankGroup | None = None, **options: Any) -> None:
            super().__init__(**options)
            self._group, self._num_embeddings = ranks, num_embeddings

        def sample(self, logits: torch.Tensor, *arguments: Any) -> None:
            assert self._group is not None
            num_missing = -(-self._num_embeddings // self._group.size) - logits.shape[1]
            padded = functional.pad(logits, (0, num_missing))
            super().sample(self._group.all_gather(padded)[:, : self._num_embeddings], *arguments)

    def with_graphs(build: Callable[..., ModelRunner], settings: Settings, *arguments: Any) -> ModelRunner:
        runner = build(settings, *arguments)
        group: Any = runner._ranks
        group.sampling = group if can_sample else None
        simulated.capture(runner, 16)
        launch = runner.launch

        def launch_and_count(plan: StepPlan) -> Any:
            needs_logits.append(plan.needs_logits)
            return launch(plan)

        if group.rank:
            monkeypatch.setattr(runner, "launch", launch_and_count)
        return runner

    simulated.simulate_graphs(monkeypatch)
    monkeypatch.setattr(simulated.decode_graphs, "SamplingKernels", Kernels)
    for module in (rank_threads, runner_world):
        monkeypatch.setattr(module, "build", partial(with_graphs, module.build))
    with ranked_world(settings_of(tmp_path, depth=1), 2) as world:
        check_equal(answer(world), expected)
    assert set(needs_logits) == ({False, True} if can_sample else {True})
