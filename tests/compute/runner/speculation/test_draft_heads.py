"""Draft heads: they propose what plain torch computes, and do not change answers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace

from aioengine.runner.speculation.draft_model import DraftModel, Proposal
from tests.compute.runner_world import World, make_settings, save_model, with_draft
from tests.kit.draft_heads import PlainHead, head_config, random_tensors, save_head
from tests.kit.tiny_sizes import VOCAB_SIZE

if TYPE_CHECKING:
    from pathlib import Path

    from aioengine.settings.config import Settings

HEADS = {
    "eagle3": ("EAGLE3", {"draft_vocab_size": 200}),
    "whole": ("EAGLE3", {"draft_vocab_size": VOCAB_SIZE, "eagle_aux_hidden_state_layer_ids": [0, 2, 3]}),
    "shared": ("EAGLE3", {"bias": True}),
    "eagle": ("EAGLE", {"bias": True}),
}


class Case(NamedTuple):
    """The settings of an engine with a head, and the head in plain torch."""

    settings: Settings
    plain: PlainHead
    model_folder: Path


@pytest.fixture(scope="module", params=HEADS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("heads")
    algorithm, changes = HEADS[request.param]
    model = save_model("llama", folder / "model", num_hidden_layers=5, initializer_range=0.3)
    config = head_config(**changes)
    tensors = random_tensors(config, algorithm)
    save_head(folder / "head", config, tensors)
    layers = tuple(changes.get("eagle_aux_hidden_state_layer_ids", (2, 2, 2))) if algorithm == "EAGLE3" else (5,)
    return Case(
        with_head(make_settings(folder / "model"), folder / "head", algorithm, layers),
        PlainHead(config, tensors, model, algorithm),
        folder / "model",
    )


def with_head(settings: Settings, folder: Path, algorithm: str, layers: tuple[int, ...]) -> Settings:
    """Add a draft head that reads the inputs of these layers."""
    settings = with_draft(settings, folder)
    draft = settings.runner.draft
    assert draft is not None
    draft = replace(draft, model=replace(draft.model, draft_head=algorithm), read_layers=layers)
    return replace(settings, runner=replace(settings.runner, draft=draft))


class Recorder:
    """Records the proposals of a world, each with the tokens before it."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[list[int], list[int]]] = []
        propose = DraftModel.propose

        def recorded(model: DraftModel, proposals: list[Proposal]) -> list[list[int]]:
            found = propose(model, proposals)
            for (drafted, _, _), token_ids in zip(proposals, found, strict=True):
                self.seen.append((drafted.token_ids.copy(), token_ids))
            return found

        monkeypatch.setattr(DraftModel, "propose", recorded)


def prompt_of(seed: int, length: int = 24) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB_SIZE), k=length)


def check(recorder: Recorder, plain: PlainHead) -> None:
    """Each draft has the highest logit in plain torch, but for rounding."""
    assert recorder.seen
    for token_ids, drafts in recorder.seen:
        with torch.no_grad():
            logits = plain.logits(token_ids, drafts)
        assert (logits.amax(1) - logits[range(len(drafts)), drafts]).max() < 0.05


@pytest.mark.parametrize("chunk_tokens", [5, 512])
def test_proposals_are_those_of_plain_torch(case: Case, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(case.settings, scheduler=replace(case.settings.scheduler, chunk_tokens=chunk_tokens))
    world = World(settings)
    recorder = Recorder(world, monkeypatch)
    prompts = [prompt_of(seed, length) for seed, length in enumerate((1, 2, 31))]
    answers = world.answers(prompts, max_new_tokens=20)
    plain: dict[str, Any] = {"chunk_tokens": chunk_tokens}
    assert answers == World(make_settings(case.model_folder, **plain)).answers(prompts, max_new_tokens=20)
    check(recorder, case.plain)


def test_proposals_after_prefix_hits_are_those_of_plain_torch(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(case.settings)
    recorder = Recorder(world, monkeypatch)
    planner, prompt = world.core.scheduler._planner, prompt_of(1)
    costs, planner._draft_costs = planner._draft_costs, None  # the first answer has no drafts
    (first,) = world.answers([prompt], max_new_tokens=40)
    planner._draft_costs = costs
    for number in (21, 34, 13, 34):
        (answer,) = world.answers([prompt + first[:number]], max_new_tokens=12)
        assert answer[: 40 - number] == first[number:][:12]
    assert min(list(world.num_cached.values())[1:]) >= 36
    check(recorder, case.plain)
