"""Drafts of a draft model: they do not change answers, and all drafts of an equal model are accepted."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from msgspec.structs import replace

from aioengine.protocol.messages import Sampling
from aioengine.settings.config import DraftSettings, ModelSettings, Settings
from tests.compute.runner_world import World, make_settings, save_model
from tests.kit.drafts import save_with_draft
from tests.kit.tiny_sizes import CONTEXT_LENGTH, VOCAB_SIZE

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ("equal", "random", "latent")


class Folders(NamedTuple):
    model: Path
    drafts: dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A model, a draft model with the same logits, and other draft models."""
    names = "model", *KINDS
    found = {name: tmp_path_factory.mktemp(name) for name in names}
    save_with_draft(save_model("llama", found["model"], num_hidden_layers=3), found["model"], found["equal"])
    save_model("qwen3", found["random"], hidden_size=32)
    save_model("youtu", found["latent"])
    return Folders(found["model"], {kind: found[kind] for kind in KINDS})


def with_draft(settings: Settings, folder: Path, *, max_drafts: int = 4, max_length: int = CONTEXT_LENGTH) -> Settings:
    model = ModelSettings(
        path=str(folder), dtype="float32", load_format="auto", context_length=max_length, vocab_size=VOCAB_SIZE
    )
    draft = DraftSettings(model=model, attention_backend="torch")
    return replace(
        settings,
        scheduler=replace(settings.scheduler, max_drafts=max_drafts),
        runner=replace(settings.runner, draft=draft),
    )


def accepted(world: World) -> float:
    """Return the share of accepted drafts."""
    stats = world.core.scheduler.stats(0.0)
    assert stats.num_proposed_drafts
    return stats.num_accepted_drafts / stats.num_proposed_drafts


def prompt_of(seed: int, length: int = 24) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB_SIZE), k=length)


@pytest.mark.parametrize(
    "sampling", [Sampling(1, temperature=0.0), Sampling(2), Sampling(3, temperature=2.0, top_p=0.9)]
)
@pytest.mark.parametrize("chunk_tokens", [5, 512])
def test_all_drafts_of_an_equal_model_are_accepted(folders: Folders, sampling: Sampling, chunk_tokens: int) -> None:
    settings = make_settings(folders.model, chunk_tokens=chunk_tokens)
    prompts = [prompt_of(seed, length) for seed, length in enumerate((1, 4, 31))]
    plain = World(settings).answers(prompts, [sampling] * 3, max_new_tokens=41)
    world = World(with_draft(settings, folders.drafts["equal"]))
    assert world.answers(prompts, [sampling] * 3, max_new_tokens=41) == plain
    assert accepted(world) == 1
    assert world.core.scheduler.stats(0.0).num_accepted_drafts >= (32 if chunk_tokens == 5 else 3 * 32)


def test_prefix_hits_on_pages_without_drafts_are_computed_by_the_draft_model(folders: Folders) -> None:
    world = World(with_draft(make_settings(folders.model), folders.drafts["equal"]))
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


def test_pages_that_another_request_had_before_are_not_taken_for_computed(folders: Folders) -> None:
    world = World(with_draft(make_settings(folders.model, num_pages=64), folders.drafts["equal"]))
    planner, costs = world.core.scheduler._planner, world.core.scheduler._draft_costs
    for seed in range(8):  # each request evicts the pages of earlier ones
        planner._draft_costs = None
        (first,) = world.answers([prompt_of(seed)], max_new_tokens=100)
        planner._draft_costs = costs
        world.answers([prompt_of(seed) + first], max_new_tokens=40)
    assert accepted(world) == 1


@pytest.mark.parametrize("max_length", [30, 48])
def test_requests_beyond_the_length_of_the_draft_model_have_no_drafts(folders: Folders, max_length: int) -> None:
    settings = make_settings(folders.model)
    world = World(with_draft(settings, folders.drafts["equal"], max_length=max_length))
    prompts = [prompt_of(1, 25), prompt_of(2, 60)]
    assert world.answers(prompts, max_new_tokens=60) == World(settings).answers(prompts, max_new_tokens=60)
    assert accepted(world) == 1
    assert world.core.scheduler.stats(0.0).num_accepted_drafts <= max_length - 25


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize(("family", "num_layers"), [("gemma3_text", 6), ("mistral", 2)])
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
    assert world.runner._drafts is not None
    assert world.runner._drafts._model is not None
    for tensor in world.runner._drafts._model._parts.kv_pool.tensors:
        assert tensor[:, :, 1:].isfinite().all()


SAMPLINGS = [
    Sampling(0, temperature=0.0),
    Sampling(0),
    Sampling(0, temperature=0.0, repetition_penalty=1.2),
    Sampling(0, temperature=0.7, top_p=0.8, frequency_penalty=0.4),
    Sampling(0, top_k=7, presence_penalty=0.5, bad_token_ids=((11,), (3, 4), (120, 7, 9))),
    Sampling(0, min_p=0.05, bias_token_ids=(9,), logit_bias=(3.0,), allowed_token_ids=tuple(range(250))),
    Sampling(0, temperature=0.3, min_new_tokens=9, suppressed_token_ids=(5, 6)),
]


@pytest.mark.parametrize(
    ("kind", "num_pages", "chunk_tokens", "page_size"),
    [
        ("equal", 80, 32, 4),
        ("equal", 400, 9, 4),
        ("equal", 1024, 512, 1),
        ("random", 80, 32, 4),
        ("latent", 400, 64, 8),
    ],
)
def test_random_requests_have_the_answers_of_a_plain_engine(
    folders: Folders, kind: str, num_pages: int, chunk_tokens: int, page_size: int
) -> None:
    rng = random.Random(f"{kind} {num_pages}")
    settings = make_settings(folders.model, num_pages=num_pages, chunk_tokens=chunk_tokens, page_size=page_size)
    requests: list[tuple[list[int], Sampling, int]] = []
    for seed in range(16):
        prompt = prompt_of(rng.randrange(4), rng.randrange(1, 90)) + prompt_of(seed, rng.randrange(3))
        requests.append((prompt, replace(rng.choice(SAMPLINGS), seed=seed), rng.randrange(1, 48)))
    answers: list[list[list[int]]] = []
    for world in (World(settings), World(with_draft(settings, folders.drafts[kind], max_drafts=rng.choice([2, 4, 7])))):
        waiting, order = list(requests), random.Random(1)
        while waiting or world.core.has_work:
            while waiting and order.random() < 0.3:
                prompt, sampling, max_new_tokens = waiting.pop()
                world.submit(prompt, sampling, max_new_tokens=max_new_tokens)
            world.step()
            if world.core.requests.running and order.random() < 0.05:
                world.core.requests.preempt()
        world.core.scheduler.check_integrity()
        answers.append([world.outputs[uid] for uid in sorted(world.outputs)])
    assert world.num_preemptions
    assert answers[0] == answers[1]
    if kind == "equal":  # all are accepted but those after bad words
        assert accepted(world) > 0.8
