"""Drafts of a draft model: they do not change answers, and all drafts of an equal model are accepted."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from msgspec.structs import replace

from aioengine.constraints.grammars import Grammars
from aioengine.protocol.messages import Sampling
from aioengine.protocol.packed_logprobs import LogprobRules
from aioengine.runner.speculation.draft_model import DraftModel
from tests.compute.runner_world import World, make_settings, save_model, with_draft
from tests.kit.drafts import save_with_draft
from tests.kit.grammar_walks import FOLDER, grammar_of
from tests.kit.grids import grid
from tests.kit.tiny_sizes import CONTEXT_LENGTH, VOCAB_SIZE

if TYPE_CHECKING:
    from pathlib import Path

    from aioengine.runner.inputs import StepRows


class Folders(NamedTuple):
    """The folders of a model, and of a draft model with the same logits."""

    model: Path
    draft: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("models")
    folders = Folders(folder / "model", folder / "draft")
    save_with_draft(save_model("llama", folders.model, num_hidden_layers=3), *folders)
    return folders


def accepted(world: World) -> float:
    """Return the share of accepted drafts."""
    stats = world.core.scheduler.stats(0.0)
    assert stats.num_proposed_drafts
    return stats.num_accepted_drafts / stats.num_proposed_drafts


def prompt_of(seed: int, length: int = 24) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB_SIZE), k=length)


@pytest.mark.parametrize(
    ("sampling", "chunk_tokens"),
    grid([(Sampling(1, temperature=0.0),), (Sampling(2),), (Sampling(3, temperature=2.0, top_p=0.9),)], [(5,), (512,)]),
)
def test_all_drafts_of_an_equal_model_are_accepted(folders: Folders, sampling: Sampling, chunk_tokens: int) -> None:
    settings = make_settings(folders.model, chunk_tokens=chunk_tokens)
    prompts = [prompt_of(seed, length) for seed, length in enumerate((1, 4, 31))]
    plain = World(settings).answers(prompts, [sampling] * 3, max_new_tokens=41)
    world = World(with_draft(settings, folders.draft))
    assert world.answers(prompts, [sampling] * 3, max_new_tokens=41) == plain
    assert accepted(world) == 1
    assert world.core.scheduler.stats(0.0).num_accepted_drafts >= (32 if chunk_tokens == 5 else 3 * 32)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1, temperature=0.0, repetition_penalty=1.2),
        Sampling(2, temperature=0.7, frequency_penalty=0.4, presence_penalty=0.1),
        Sampling(3, bias_token_ids=(9,), logit_bias=(3.0,), allowed_token_ids=tuple(range(50))),
        Sampling(4, min_new_tokens=30, suppressed_token_ids=(5, 6)),
        Sampling(5, grammar=grammar_of(regex="([a-d]{3,30}!){9}")),
        Sampling(6, temperature=0.0, grammar=grammar_of(json_schema={"type": "array", "minItems": 9})),
    ],
)
def test_drafts_follow_the_parameters_of_the_request(folders: Folders, sampling: Sampling) -> None:
    answers: list[list[list[int]]] = []
    settings = make_settings(folders.model)
    for world in (World(settings), World(with_draft(settings, folders.draft))):
        world.runner.use_grammars(Grammars(str(FOLDER), VOCAB_SIZE))
        prompts = [prompt_of(seed) for seed in range(3)]
        answers.append(world.answers(prompts, [sampling] * 3, max_new_tokens=30))
    assert answers[0] == answers[1]
    assert accepted(world) == 1


def test_prefix_hits_on_pages_without_drafts_are_computed_by_the_draft_model(folders: Folders) -> None:
    world = World(with_draft(make_settings(folders.model), folders.draft))
    prompt, planner = prompt_of(1), world.core.scheduler._planner
    costs, planner._draft_costs = planner._draft_costs, None
    (first,) = world.answers([prompt], max_new_tokens=40)
    planner._draft_costs = costs
    assert world.core.scheduler.stats(0.0).num_proposed_drafts == 0
    prompts = [prompt + first, prompt + first[:21], prompt]
    answers = world.answers(prompts, max_new_tokens=30)
    assert min(list(world.num_cached.values())[1:]) >= 20
    assert accepted(world) == 1
    assert answers == World(make_settings(folders.model)).answers(prompts, max_new_tokens=30)


def test_a_long_prefix_that_the_draft_model_never_saw_is_computed_in_parts(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(folders.model, chunk_tokens=32)
    world = World(with_draft(settings, folders.draft))
    prompt = prompt_of(1, 200)
    world.submit(prompt, max_new_tokens=0, logprobs=LogprobRules(start=-1, num_top=0, token_ids=(5,)))
    world.run()  # it does not compute prompts without answers
    sizes: list[int] = []
    forward = DraftModel._forward

    def counted(model: DraftModel, rows: StepRows, *arguments: Any) -> Any:
        sizes.append(int(rows.counts.sum()))
        return forward(model, rows, *arguments)

    monkeypatch.setattr(DraftModel, "_forward", counted)
    prompts = [prompt, prompt_of(2, 10)]
    assert world.answers(prompts, max_new_tokens=60) == World(settings).answers(prompts, max_new_tokens=60)
    assert world.num_cached[1] >= 190
    assert sum(sizes) > 200
    assert max(sizes) <= settings.scheduler.max_step_tokens
    assert accepted(world) == 1
    assert world.core.scheduler.stats(0.0).num_accepted_drafts > 70


def test_pages_that_another_request_had_before_are_not_taken_for_computed(folders: Folders) -> None:
    world = World(with_draft(make_settings(folders.model, num_pages=64), folders.draft))
    planner, costs = world.core.scheduler._planner, world.core.scheduler._draft_costs
    for seed in range(4):  # each request evicts the pages of earlier ones
        planner._draft_costs = None
        (first,) = world.answers([prompt_of(seed)], max_new_tokens=100)
        planner._draft_costs = costs
        world.answers([prompt_of(seed) + first], max_new_tokens=40)
    assert accepted(world) == 1


@pytest.mark.parametrize("max_length", [30, 48])
def test_requests_beyond_the_length_of_the_draft_model_have_no_drafts(folders: Folders, max_length: int) -> None:
    settings = make_settings(folders.model)
    world = World(with_draft(settings, folders.draft, max_length=max_length))
    prompts = [prompt_of(1, 25), prompt_of(2, 60)]
    assert world.answers(prompts, max_new_tokens=60) == World(settings).answers(prompts, max_new_tokens=60)
    assert accepted(world) == 1
    assert world.core.scheduler.stats(0.0).num_accepted_drafts <= max_length - 25


@pytest.mark.parametrize(
    ("family", "num_layers", "kv_dtype"), grid([("gemma3_text", 6), ("mistral", 2)], [(None,), ("int8",)])
)
def test_windows_of_both_models(family: str, num_layers: int, kv_dtype: str | None, tmp_path: Path) -> None:
    folder, draft_folder = tmp_path / "model", tmp_path / "draft"
    model = save_model(family, folder, num_hidden_layers=num_layers, sliding_window=20)
    save_with_draft(model, folder, draft_folder)
    settings = make_settings(folder, num_pages=512)
    settings = replace(settings, memory=replace(settings.memory, kv_dtype=kv_dtype))
    max_length = 20 if family == "mistral" else CONTEXT_LENGTH  # all layers of mistral free old pages
    world = World(with_draft(settings, draft_folder, max_length=max_length))
    prompts = [prompt_of(seed, length) for seed, length in enumerate((1, 15, 60))]
    assert world.answers(prompts, max_new_tokens=60) == World(settings).answers(prompts, max_new_tokens=60)
    assert world.answers(prompts[::-1], max_new_tokens=60)
    assert accepted(world) == 1


def test_a_draft_model_with_non_finite_numbers_proposes_nothing(folders: Folders, tmp_path: Path) -> None:
    draft: Any = save_model("llama", tmp_path)
    weights = draft.state_dict()
    weights["model.layers.1.mlp.down_proj.weight"][:] = 3e38
    weights["model.layers.0.mlp.down_proj.weight"][:] = 3e38
    draft.save_pretrained(tmp_path)
    settings = make_settings(folders.model)
    world = World(with_draft(settings, tmp_path))
    prompts = [prompt_of(seed) for seed in range(3)]
    assert world.answers(prompts, max_new_tokens=30) == World(settings).answers(prompts, max_new_tokens=30)
    assert world.core.scheduler.stats(0.0).num_proposed_drafts == 0
    assert world.runner._proposer is not None
    assert world.runner._proposer._model is not None
    for tensor in world.runner._proposer._model._parts.kv_pool.tensors:
        assert tensor[:, :, 1:].isfinite().all()
