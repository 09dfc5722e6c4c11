"""Drafts with CUDA graphs, which are simulated on the CPU: the same answers as without drafts and graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.compute.runner.speculation import test_storms as storms
from tests.compute.runner_world import World

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestCollectionWarning")

folders = storms.folders


@pytest.fixture(autouse=True)
def graph_worlds(monkeypatch: pytest.MonkeyPatch) -> list[World]:
    """Let the worlds of storms have graphs. Return these worlds."""
    from tests.compute import simulated_graphs as simulated

    simulated.simulate_graphs(monkeypatch)
    worlds: list[World] = []

    class GraphWorld(World):
        def __post_init__(self) -> None:
            super().__post_init__()
            if self.settings.scheduler.max_drafts:
                simulated.capture(self.runner, 48)
                worlds.append(self)

    monkeypatch.setattr(storms, "World", GraphWorld)
    return worlds


CASES = [
    ("llama", 512, 7, 1, {}),
    ("qwen3", 96, 3, 1, {}),
    ("llama", 128, 2, 0, {"logprobs_mode": "processed"}),
    ("drafted", 512, 4, 1, {"draft": "equal"}),
    ("drafted", 128, 3, 1, {"draft": "qwen3"}),
]


@pytest.mark.parametrize(("family", "num_pages", "max_drafts", "depth", "changes"), CASES)
def test_answers_equal_the_answers_without_drafts(
    folders: dict[str, Path],
    graph_worlds: list[World],
    family: str,
    num_pages: int,
    max_drafts: int,
    depth: int,
    changes: dict[str, str],
) -> None:
    storms.check(folders, family, 24, num_pages, max_drafts, depth, changes)
    (world,) = graph_worlds
    graphs: Any = world.runner._graphs
    assert min(graphs.num_replayed) > 10
