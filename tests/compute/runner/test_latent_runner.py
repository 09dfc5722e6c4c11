"""Latent attention in the runner: preemption, chunks, prefix hits and adapters, against transformers in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from aioengine.model_files.adapter_folder import read_folder
from aioengine.runner.build import build
from tests.compute.runner.test_adapters import PROMPTS, adapter, continued, generate, opened, with_adapters
from tests.compute.runner_world import World, make_settings, save_model
from tests.kit.adapters import merged, save_adapter

if TYPE_CHECKING:
    from pathlib import Path

ADAPTED = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Saved(NamedTuple):
    folder: Path
    expected: list[list[int]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save("youtu", tmp_path_factory.mktemp("youtu"))


def save(family: str, folder: Path) -> Saved:
    with torch.inference_mode():
        return Saved(folder, continued(save_model(family, folder), 12)[0])


@pytest.mark.parametrize(("page_size", "chunk_tokens", "depth"), [(4, 512, 0), (1, 32, 1), (3, 40, 1)])
def test_greedy_tokens_equal_transformers(saved: Saved, page_size: int, chunk_tokens: int, depth: int) -> None:
    world = World(make_settings(saved.folder, page_size=page_size, chunk_tokens=chunk_tokens, depth=depth))
    assert world.answers(PROMPTS) == saved.expected
    assert world.answers([*PROMPTS]) == saved.expected
    assert any(world.num_cached.values()), "no prefix was cached"


def test_greedy_tokens_with_experts_equal_transformers(tmp_path: Path) -> None:
    folder, expected = save("deepseek_v3", tmp_path)
    for changes in ({}, {"page_size": 3, "chunk_tokens": 40, "depth": 1}):
        world = World(make_settings(folder, **changes))
        assert world.answers(PROMPTS) == expected
        assert world.answers([*PROMPTS]) == expected
        assert any(world.num_cached.values()), "no prefix was cached"


def test_preemption_changes_nothing(saved: Saved) -> None:
    expected = World(make_settings(saved.folder)).answers(PROMPTS, max_new_tokens=40)
    short_of_pages = World(make_settings(saved.folder, num_pages=40))
    assert short_of_pages.answers(PROMPTS, max_new_tokens=40) == expected
    assert short_of_pages.num_preemptions > 0


def test_adapters_of_all_projections(saved: Saved, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(saved.folder).eval()
    path = save_adapter(base, tmp_path / "adapter", target_modules=ADAPTED)
    runner = build(with_adapters(make_settings(saved.folder)), lambda _: None)
    runner.adapters.place(1, runner.adapters.read(adapter(path))).result(timeout=60)
    with torch.inference_mode():
        expected, _ = continued(merged(base, path))
    slots = [i % 2 for i in range(len(PROMPTS))]
    rows = [opened(i, slot, PROMPTS[i]) for i, slot in enumerate(slots)]
    wanted = [expected[i] if slot else saved.expected[i][:6] for i, slot in enumerate(slots)]
    assert expected != [tokens[:6] for tokens in saved.expected], "the adapter changes nothing"
    assert generate(runner, rows) == wanted
    assert generate(runner, rows, chunk=4) == wanted


def test_an_adapter_of_the_expansion_is_refused_by_name(saved: Saved, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(saved.folder)
    path = save_adapter(base, tmp_path / "adapter", target_modules=["o_proj", "kv_b_proj"])
    runner = build(with_adapters(make_settings(saved.folder)), lambda _: None)
    assert read_folder(path)
    with pytest.raises(ValueError, match="kv_b_proj"):
        runner.adapters.read(adapter(path))
