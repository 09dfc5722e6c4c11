"""Draft heads on a GPU: answers equal the answers without drafts, and heads read the right hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from aioengine import Engine
from tests.compute.runner_world import save_model
from tests.gpu.test_draft_models import answers
from tests.gpu.test_recovery import CONTEXT_LENGTH, DEVICE, HEADS
from tests.kit.draft_heads import head_config, random_tensors, save_head, save_repeating, save_with_mtp

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.process

SIZES: dict[str, Any] = {**HEADS, "max_position_embeddings": CONTEXT_LENGTH, "num_hidden_layers": 5}


async def test_answers_are_those_without_drafts(tmp_path: Path) -> None:
    save_model("qwen3", tmp_path / "model", dtype=torch.bfloat16, **SIZES)
    config = head_config(**SIZES | {"num_hidden_layers": 1}, draft_vocab_size=200)
    tensors = random_tensors(config, "EAGLE3", scale=0.1)
    save_head(
        tmp_path / "head",
        config,
        {name: tensor.bfloat16() for name, tensor in tensors.items() if tensor.is_floating_point()}
        | {"d2t": tensors["d2t"]},
    )
    save_with_mtp(
        save_model("deepseek_v3", tmp_path / "mtp", num_hidden_layers=4, max_position_embeddings=CONTEXT_LENGTH),
        tmp_path / "mtp",
    )
    cases: list[tuple[str, dict[str, Any]]] = [
        ("model", {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": tmp_path / "head"}),
        ("mtp", {"speculative_algorithm": "MTP"}),
    ]
    for name, arguments in cases:
        plain, _ = await answers(tmp_path / name)
        tokens, stats = await answers(tmp_path / name, **arguments)
        assert tokens == plain
        assert stats["num_proposed_drafts"] > 0


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_all_drafts_that_read_the_right_hidden_state_are_accepted(algorithm: str, tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "model", dtype=torch.bfloat16, **SIZES)
    save_repeating(model, tmp_path / "model", tmp_path / "head", algorithm, **SIZES | {"num_hidden_layers": 1})
    arguments = {"speculative_algorithm": algorithm, "speculative_draft_model_path": tmp_path / "head"}
    prompts = [[(number * number) % 290 + 1 for number in range(length)] for length in (1, 4, 70, 300)]
    params = {"temperature": 0, "max_new_tokens": 100}
    with Engine(tmp_path / "model", device=DEVICE, skip_tokenizer_init=True, **arguments) as engine:
        for _ in range(2):  # then with prefix hits
            result = engine.generate(input_ids=prompts, sampling_params=params)
            assert result["output_ids"] == [prompt[-1:] * 100 for prompt in prompts]
        stats = engine.stats()
        assert 0 < stats["num_proposed_drafts"] == stats["num_accepted_drafts"]
