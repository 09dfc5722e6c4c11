"""Draft models on a GPU: in deterministic mode, answers equal the answers of an engine without drafts."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aioengine import AsyncEngine
from tests.compute.runner_world import save_model
from tests.gpu.test_recovery import CONTEXT_LENGTH, DEVICE, HEADS, SAMPLINGS
from tests.kit.drafts import save_with_draft

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.process


async def answers(folder: Path, **options: Any) -> tuple[list[list[int]], dict[str, int]]:
    rng = random.Random(0)
    prompts = [[rng.randrange(260) for _ in range(rng.randrange(1, 300))] for _ in range(18)]
    params: list[dict[str, Any]] = [
        {**SAMPLINGS[number % len(SAMPLINGS)], "max_new_tokens": rng.randrange(20, 200)} for number in range(18)
    ]
    for each in params:
        each.pop("stop", None)  # there is no tokenizer
    async with AsyncEngine(
        str(folder),
        device=DEVICE,
        skip_tokenizer_init=True,
        enable_deterministic_inference=True,
        max_total_tokens=32 * CONTEXT_LENGTH,
        **options,
    ) as engine:
        found = await engine.async_generate(input_ids=prompts, sampling_params=params)
        return found["output_ids"], engine.stats()


async def test_answers_are_those_without_drafts(tmp_path: Path) -> None:
    sizes = {**HEADS, "max_position_embeddings": CONTEXT_LENGTH, "initializer_range": 0.1}
    model, draft, other = tmp_path / "model", tmp_path / "draft", tmp_path / "other"
    save_with_draft(save_model("qwen3", tmp_path / "first", dtype=torch.bfloat16, **sizes), model, draft)
    save_model("qwen3", other, dtype=torch.bfloat16, **{**sizes, "initializer_range": 0.2})
    plain, _ = await answers(model)
    for folder, least in ((draft, 0.5), (other, 0.0)):
        found, stats = await answers(
            model, speculative_algorithm="STANDALONE", speculative_draft_model_path=str(folder)
        )
        assert found == plain
        assert stats["num_proposed_drafts"] > 0
        assert stats["num_accepted_drafts"] >= least * stats["num_proposed_drafts"]
