"""Decode graphs with cascade attention, simulated on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aioengine.protocol.messages import Sampling
from tests.compute.runner_world import World, make_settings, save_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("top_k", [0, 20])
def test_answers_of_rows_with_shared_pages_are_the_same(
    top_k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With top-k, tokens are sampled outside of the graph."""
    pytest.importorskip("triton")
    from tests.compute import simulated_graphs as simulated

    save_model("llama", tmp_path)
    settings = make_settings(tmp_path, depth=1)
    prefixes = [[(3 * i + seed) % 290 + 1 for i in range(30)] for seed in (0, 7, 50)]
    prompts = [[*prefixes[i % 3], *((5 * i + j) % 290 + 1 for j in range(3 + i))] for i in range(14)]
    samplings = [Sampling(seed, temperature=0.4 * (seed % 3), top_k=top_k) for seed in range(len(prompts))]
    expected = World(settings).answers(prompts, samplings)
    planned: list[list[int]] = []
    plan_shared = simulated.FixedSharedRows.plan_shared

    def recorded(attention: Any, pages: Any) -> None:
        planned.append(pages.num_pages.tolist())
        plan_shared(attention, pages)

    monkeypatch.setattr(simulated.FixedSharedRows, "plan_shared", recorded)
    simulated.simulate_graphs(monkeypatch)
    world = World(settings)
    simulated.capture(world.runner, 16, simulated.CascadeTorch)
    assert world.answers(prompts, samplings) == expected
    assert [7, 7, 7] in planned
