"""Tokens of a model whose rotations depend on the length of the text equal transformers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from aioengine.api.args import engine_config
from aioengine.model_files.model_folder import find_facts
from aioengine.protocol.messages import Sampling
from aioengine.settings.machine import DeviceFacts
from aioengine.settings.resolve import resolve
from tests.compute.runner_world import World
from tests.kit.decoders import config_of, random_model
from tests.kit.settings import small_settings

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

SHORT, NUM_NEW = 64, 24
"""The original length, and output tokens of each request."""


@pytest.fixture(scope="module", name="model")
def _model() -> PreTrainedModel:
    return random_model(config_of("phi3 longrope"))


@pytest.fixture(scope="module", name="prompts")
def _prompts() -> list[list[int]]:
    """Return prompts that stay short, that become long with the first output token or later, and that are long. Each is
    there twice, with different last tokens.
    """
    shuffled = random.Random(3)
    lengths = (10, 40, 41, 45, 63, 64, 65, 90)
    prompts = [[shuffled.randrange(96) for _ in range(length)] for length in lengths]
    return prompts + [[*prompt[:-1], (prompt[-1] + 1) % 96] for prompt in prompts]


@pytest.fixture(scope="module", name="expected")
def _expected(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of transformers, which computes a text again when it becomes long."""
    results: list[list[int]] = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        results.append(answer[0, len(prompt) :].tolist())
    return results


def world(folder: Path, model: PreTrainedModel, **changes: object) -> World:
    model.save_pretrained(folder)
    fields = {"context_length": 512, "chunk_tokens": 37, "page_size": 4, "num_pages": 400, "depth": 0, **changes}
    return World(small_settings(path=str(folder), vocab_size=96, load_format="auto", short_length=SHORT, **fields))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"num_pages": 40, "depth": 1},
        {},
        {"depth": 1},
        {"prefix_cache": False},
        {"page_size": 32, "num_pages": 48},
    ],
)
def test_tokens_equal_transformers(
    tmp_path: Path,
    model: PreTrainedModel,
    prompts: list[list[int]],
    expected: list[list[int]],
    changes: dict[str, object],
) -> None:
    engine = world(tmp_path, model, **changes)
    assert engine.answers(prompts, max_new_tokens=NUM_NEW) == expected
    assert bool(engine.num_preemptions) == (changes.get("num_pages") == 40)
    assert engine.answers(prompts[5::-1], max_new_tokens=NUM_NEW) == expected[5::-1]


def test_prefixes_are_shared_by_requests_with_the_same_rotations(tmp_path: Path, model: PreTrainedModel) -> None:
    engine = world(tmp_path, model)
    tokens = list(range(80))
    uids: list[int] = []
    for length in (60, 50, 80, 79):
        uids.append(engine.submit(tokens[:length], Sampling(0, temperature=0.0), max_new_tokens=2))
        engine.run()
    assert [engine.num_cached[uid] for uid in uids] == [0, 48, 0, 76]


def test_short_context_uses_only_short_rotations(tmp_path: Path, model: PreTrainedModel) -> None:
    model.save_pretrained(tmp_path)
    for context_length, expected in ((512, SHORT), (65, SHORT), (64, 0)):
        config = engine_config(str(tmp_path), {"context_length": context_length, "skip_tokenizer_init": True})
        facts = find_facts(config.model)
        settings = resolve(config, facts, DeviceFacts(num_threads=1, cpu_bfloat16=False, num_gpus=0, drawn_seed=0))
        assert settings.scheduler.short_length == expected
