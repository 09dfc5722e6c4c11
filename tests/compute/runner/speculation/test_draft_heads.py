"""Draft heads: they propose what plain torch computes, and do not change answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace

from aioengine.runner.speculation.draft_model import DeviceDrafts, DraftModel, DraftPlan
from tests.compute.runner.speculation.test_draft_model import accepted, prompt_of
from tests.compute.runner_world import World, make_settings, save_model, with_draft
from tests.kit.draft_heads import (
    PlainHead,
    head_config,
    random_tensors,
    save_head,
    save_repeating,
    save_speculators_head,
    save_with_mtp,
)
from tests.kit.grids import grid
from tests.kit.tiny_sizes import VOCAB_SIZE

if TYPE_CHECKING:
    from pathlib import Path

    from aioengine.settings.config import Settings

HEADS = {
    "eagle3": ("EAGLE3", {"draft_vocab_size": 200}),
    "whole": ("EAGLE3", {"draft_vocab_size": VOCAB_SIZE, "eagle_aux_hidden_state_layer_ids": [0, 2, 3]}),
    "shared": ("EAGLE3", {"bias": True}),
    "speculators": ("EAGLE3", {"draft_vocab_size": 200, "norm_before_residual": True}),
    "eagle": ("EAGLE", {"bias": True}),
    "mtp": ("MTP", {}),
}


Proposals = list[tuple[list[int], list[int]]]
"""Tokens of a request, and the drafts after them."""


class Case(NamedTuple):
    """The settings of an engine with a head, and the head in plain torch."""

    settings: Settings
    plain: PlainHead
    model_folder: Path


@pytest.fixture(scope="module", params=HEADS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("heads")
    algorithm, changes = HEADS[request.param]
    if algorithm == "MTP":
        model = save_model("deepseek_v3", folder / "model", num_hidden_layers=4)
        plain = save_with_mtp(model, folder / "model")
        settings = make_settings(folder / "model")
        settings = with_draft(settings, folder / "model", head=algorithm, read_layers=(3,))
        return Case(settings, plain, folder / "model")
    model = save_model("llama", folder / "model", num_hidden_layers=5, initializer_range=0.3)
    config = head_config(**changes)
    tensors = random_tensors(config, algorithm)
    (save_speculators_head if request.param == "speculators" else save_head)(folder / "head", config, tensors)
    layers = tuple(changes.get("eagle_aux_hidden_state_layer_ids", (2, 2, 2))) if algorithm == "EAGLE3" else (5,)
    return Case(
        with_draft(make_settings(folder / "model"), folder / "head", head=algorithm, read_layers=layers),
        PlainHead(config, tensors, model, algorithm),
        folder / "model",
    )


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Proposals:
    """Record all proposals."""
    seen: Proposals = []
    propose = DraftModel.propose

    def record(model: DraftModel, plans: list[DraftPlan]) -> DeviceDrafts | None:
        proposed = propose(model, plans)
        drafts = {} if proposed is None else proposed.by_request(proposed.token_ids.tolist())
        seen.extend(
            (plan.drafted.token_ids.copy(), drafts[uid]) for plan in plans if (uid := plan.drafted.row.uid) in drafts
        )
        return proposed

    monkeypatch.setattr(DraftModel, "propose", record)
    return seen


def check(proposals: Proposals, plain: PlainHead) -> None:
    """Check that each draft has the highest logit in plain torch, except for rounding."""
    assert proposals
    for token_ids, drafts in proposals:
        with torch.no_grad():
            logits = plain.logits(token_ids, drafts)
        assert (logits.amax(1) - logits[range(len(drafts)), drafts]).max() < 0.05


@pytest.mark.parametrize("chunk_tokens", [5, pytest.param(512, marks=pytest.mark.slow)])
def test_proposals_are_those_of_plain_torch(case: Case, chunk_tokens: int, recorded: Proposals) -> None:
    settings = replace(case.settings, scheduler=replace(case.settings.scheduler, chunk_tokens=chunk_tokens))
    prompts = [prompt_of(seed, length) for seed, length in enumerate((1, 2, 31))]
    answers = World(settings).answers(prompts, max_new_tokens=12)
    plain: dict[str, Any] = {"chunk_tokens": chunk_tokens}
    assert answers == World(make_settings(case.model_folder, **plain)).answers(prompts, max_new_tokens=12)
    check(recorded, case.plain)


@pytest.mark.parametrize("case", ["speculators", "eagle", "mtp"], indirect=True)
def test_proposals_after_prefix_hits_are_those_of_plain_torch(case: Case, recorded: Proposals) -> None:
    world = World(case.settings)
    planner, prompt = world.core.scheduler._planner, prompt_of(1)
    costs, planner._draft_costs = planner._draft_costs, None  # the first answer has no drafts
    (first,) = world.answers([prompt], max_new_tokens=40)
    planner._draft_costs = costs
    for number in (21, 34, 13, 34):
        (answer,) = world.answers([prompt + first[:number]], max_new_tokens=12)
        assert answer[: 40 - number] == first[number:][:12]
    assert min(list(world.num_cached.values())[1:]) >= 36
    check(recorded, case.plain)


@pytest.mark.parametrize(
    ("algorithm", "chunk_tokens", "depth", "num_pages"),
    grid([("EAGLE",), ("EAGLE3",)], [(5, 0, 256), (512, 1, 256), (64, 1, 40)]),
)
def test_all_drafts_that_read_the_right_hidden_state_are_accepted(
    algorithm: str, chunk_tokens: int, depth: int, num_pages: int, tmp_path: Path
) -> None:
    model = save_model("llama", tmp_path / "model", num_hidden_layers=5)
    save_repeating(model, tmp_path / "model", tmp_path / "head", algorithm)
    settings = make_settings(tmp_path / "model", chunk_tokens=chunk_tokens, depth=depth, num_pages=num_pages)
    layers = (2, 2, 2) if algorithm == "EAGLE3" else (5,)
    world = World(with_draft(settings, tmp_path / "head", head=algorithm, read_layers=layers))
    prompts = [prompt_of(seed, length) for seed, length in enumerate((1, 4, 31, 40, 31, 50))]
    for _ in range(2):
        answers = world.answers(prompts, max_new_tokens=40)
        assert answers == [prompt[-1:] * 40 for prompt in prompts]
    assert accepted(world) == 1
    is_small = num_pages == 40
    assert (world.num_preemptions > 0) == is_small
    assert (max(world.num_cached.values()) > 28) != is_small


@pytest.mark.parametrize("case", ["eagle3", "mtp"], indirect=True)
def test_released_memory_of_a_head_is_free_until_it_is_resumed(case: Case) -> None:
    world = World(case.settings)
    world.answers([prompt_of(1)], max_new_tokens=20)
    assert world.runner._proposer is not None
    assert world.runner._proposer._model is not None
    parts = world.runner._proposer._model._parts
    assert parts.features is not None
    assert parts.features.pool is not None
    assert any(tensor.any() for tensor in parts.kv_pool.tensors)
    world.runner.release_pools()
    assert parts.features.pool.untyped_storage().nbytes() == 0
    assert not any(tensor.any() for tensor in parts.kv_pool.tensors)
    world.runner.resume_pools()
    answers = world.answers([prompt_of(2)], max_new_tokens=20)
    assert answers == World(make_settings(case.model_folder)).answers([prompt_of(2)], max_new_tokens=20)


def test_a_head_with_wrong_token_ids_is_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model", num_hidden_layers=5)
    config = head_config(draft_vocab_size=200)
    tensors = random_tensors(config, "EAGLE3")
    tensors["d2t"] += VOCAB_SIZE
    save_head(tmp_path / "head", config, tensors)
    settings = with_draft(make_settings(tmp_path / "model"), tmp_path / "head", head="EAGLE3", read_layers=(2, 2, 2))
    with pytest.raises(ValueError, match="d2t has token ids from 3.. to .*, and vocab_size is 300"):
        World(settings)


@pytest.mark.parametrize("name", ["fc", "midlayer.mlp.down_proj"])
def test_a_head_with_non_finite_numbers_does_not_change_answers(name: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path / "model", num_hidden_layers=5)
    config = head_config(draft_vocab_size=200)
    tensors = random_tensors(config, "EAGLE3")
    tensors[f"{name}.weight"][:] = 3e38
    save_head(tmp_path / "head", config, tensors)
    settings = make_settings(tmp_path / "model")
    world = World(with_draft(settings, tmp_path / "head", head="EAGLE3", read_layers=(2, 2, 2)))
    prompts = [prompt_of(seed) for seed in range(3)]
    assert world.answers(prompts, max_new_tokens=30) == World(settings).answers(prompts, max_new_tokens=30)
    has_drafts = name == "fc"  # hidden states that are not finite are read as zeros
    assert (world.core.scheduler.stats(0.0).num_proposed_drafts > 0) == has_drafts
