"""Drafts with CUDA graphs, which are simulated on the CPU: the same answers as without drafts and graphs."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from aioengine.protocol.messages import Sampling
from aioengine.runner.speculation.proposer import Proposer
from tests.compute.runner.speculation import test_storms as storms
from tests.compute.runner_world import World, make_settings, save_model, with_draft
from tests.kit.draft_heads import save_repeating

if TYPE_CHECKING:
    from pathlib import Path

    from aioengine.scheduler.plan import Row

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


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record which steps could begin before the drafts of the step in flight were accepted."""
    answers: list[bool] = []
    can_follow = Proposer._can_follow

    def recorded(proposer: Proposer, rows: list[Row]) -> bool:
        answers.append(can_follow(proposer, rows))
        return answers[-1]

    monkeypatch.setattr(Proposer, "_can_follow", recorded)
    return answers


CASES = [
    ("llama", 512, 7, 1, {}),
    ("qwen3", 96, 3, 1, {}),
    ("llama", 128, 2, 0, {"logprobs_mode": "processed"}),
    ("drafted", 512, 4, 1, {"draft": "equal"}),
    ("drafted", 128, 3, 1, {"draft": "qwen3"}),
    ("llama", 128, 4, 1, {"draft": "EAGLE3"}),
    ("MTP", 128, 3, 0, {"draft": "MTP"}),
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


@pytest.mark.parametrize(
    ("family", "draft", "num_pages"),
    [
        ("drafted", "equal", 512),
        ("drafted", "qwen3", 96),
        ("llama", "EAGLE3", 512),
        ("qwen3", "EAGLE", 96),
        ("MTP", "MTP", 512),
        ("repeating", "", 512),
    ],
)
def test_steps_start_before_the_drafts_of_the_previous_step_are_accepted(
    folders: dict[str, Path],
    graph_worlds: list[World],
    followed: list[bool],
    family: str,
    draft: str,
    num_pages: int,
) -> None:
    rng = random.Random(1)
    submits = [
        replace(
            storms.random_submit(rng, uid),
            sampling=Sampling(uid, temperature=rng.choice([0.0, 0.3, 1.0])),
            logprobs=None,
        )
        for uid in range(40)
    ]
    settings = [storms.settings_of(folders[family], depth=1, num_pages=num_pages, max_drafts=most) for most in (0, 3)]
    if draft:
        head = draft if draft in storms.LAYERS else ""
        layers = storms.LAYERS.get(draft, ())
        settings[1] = with_draft(settings[1], folders[draft], max_drafts=3, head=head, read_layers=layers)
    storms.compare(*(storms.run(case, submits, seed=2) for case in settings))
    stats = graph_worlds[0].core.scheduler.stats(0.0)
    assert sum(followed) > 10
    assert draft != "equal" or stats.num_accepted_drafts > 0.95 * stats.num_proposed_drafts


@pytest.mark.parametrize(("algorithm", "depth"), [("EAGLE", 1), ("EAGLE3", 1), ("EAGLE3", 0), ("NGRAM", 1)])
def test_all_drafts_that_read_the_right_hidden_state_are_accepted(
    algorithm: str, depth: int, followed: list[bool], tmp_path: Path
) -> None:
    model = save_model("llama", tmp_path / "model", num_hidden_layers=5)
    save_repeating(model, tmp_path / "model", tmp_path / "head", algorithm)
    layers = (2, 2, 2) if algorithm == "EAGLE3" else (5,)
    settings = make_settings(tmp_path / "model", depth=depth)
    if algorithm == "NGRAM":
        settings = replace(settings, scheduler=replace(settings.scheduler, max_drafts=3, has_ngrams=True))
    else:
        settings = with_draft(settings, tmp_path / "head", head=algorithm, read_layers=layers)
    world = storms.World(settings)
    prompts = [list(range(2, length + 2)) for length in (1, 4, 31, 70)]
    for _ in range(2):  # then with prefix hits
        assert world.answers(prompts, max_new_tokens=40) == [prompt[-1:] * 40 for prompt in prompts]
    stats = world.core.scheduler.stats(0.0)
    assert 100 < stats.num_proposed_drafts == stats.num_accepted_drafts
    assert (sum(followed) > 0.6 * len(followed)) == bool(depth)
    if algorithm == "NGRAM":  # only the first step of a request does not follow another one
        assert sum(followed) > 0.9 * len(followed)
