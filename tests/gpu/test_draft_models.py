"""Drafts on a GPU: in deterministic mode, answers equal the answers of an engine without drafts."""

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

NUM_SIMPLE = 4
NUM_DRAWN = 2
"""The first ones of ``SAMPLINGS`` need no processors. Of these, the first ones are sampled in CUDA graphs, so steps
overlap.
"""


async def answers(folder: Path, **options: Any) -> tuple[list[list[int]], dict[str, int]]:
    """Return the tokens of requests with all kinds of parameters, without processors, and with a temperature only."""
    rng = random.Random(0)
    prompts = [[rng.randrange(260) for _ in range(rng.randrange(1, 100))] * rng.choice([1, 3]) for _ in range(18)]
    params: list[dict[str, Any]] = [
        {**SAMPLINGS[number % len(SAMPLINGS)], "max_new_tokens": rng.randrange(20, 200)} for number in range(18)
    ]
    for request in params:
        request.pop("stop", None)  # there is no tokenizer
    options = {"enable_deterministic_inference": True} | options
    token_ids: list[list[int]] = []
    async with AsyncEngine(
        str(folder),
        device=DEVICE,
        skip_tokenizer_init=True,
        max_total_tokens=32 * CONTEXT_LENGTH,
        **options,
    ) as engine:
        counts = [request["max_new_tokens"] for request in params]
        simple, drawn = (
            [{**SAMPLINGS[i % number], "max_new_tokens": count} for i, count in enumerate(counts)]
            for number in (NUM_SIMPLE, NUM_DRAWN)
        )
        for chosen in (params, simple, drawn):
            result = await engine.async_generate(input_ids=prompts, sampling_params=chosen)
            token_ids += result["output_ids"]
        return token_ids, engine.stats()


async def test_answers_are_those_without_drafts(tmp_path: Path) -> None:
    sizes = {**HEADS, "max_position_embeddings": CONTEXT_LENGTH, "initializer_range": 0.1}
    model, draft, other = tmp_path / "model", tmp_path / "draft", tmp_path / "other"
    save_with_draft(save_model("qwen3", tmp_path / "first", dtype=torch.bfloat16, **sizes), model, draft)
    save_model("qwen3", other, dtype=torch.bfloat16, **{**sizes, "initializer_range": 0.2})
    plain, _ = await answers(model)
    with_model = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(draft)}
    cases: list[tuple[dict[str, Any], float]] = [
        (with_model, 0.5),
        ({**with_model, "disable_cuda_graph": True}, 0.5),
        ({**with_model, "speculative_draft_model_path": str(other)}, 0.0),
        ({"speculative_algorithm": "NGRAM"}, 0.0),
        ({**with_model, "enable_deterministic_inference": False}, 0.5),  # another kernel has other bits
    ]
    for options, least in cases:
        tokens, stats = await answers(model, **options)
        assert tokens == plain or "enable_deterministic_inference" in options, options
        assert stats["num_proposed_drafts"] > 0, options
        assert stats["num_accepted_drafts"] >= least * stats["num_proposed_drafts"], options
