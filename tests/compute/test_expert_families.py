"""Families with experts against transformers, in fp32, on small random weights that transformers saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from aioengine import models
from aioengine.runner import weights
from tests.compute.stepping import Request, Stepper, options

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedConfig

    from aioengine.models._base import Model

NUM_TOKENS = 50
SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 3,
}
QWEN = {"num_experts": 8, "moe_intermediate_size": 24}
CASES: dict[str, tuple[Callable[..., PreTrainedConfig], dict[str, object]]] = {
    "mixtral": (MixtralConfig, {"num_local_experts": 5}),
    "mixtral window": (MixtralConfig, {"num_local_experts": 5, "sliding_window": 13, "router_jitter_noise": 0.1}),
    "qwen2_moe": (Qwen2MoeConfig, {**QWEN, "shared_expert_intermediate_size": 56}),
    "qwen2_moe some layers": (
        Qwen2MoeConfig,
        {
            **QWEN,
            "shared_expert_intermediate_size": 16,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
        },
    ),
    "qwen3_moe": (Qwen3MoeConfig, {**QWEN, "head_dim": 24, "norm_topk_prob": True}),
    "qwen3_moe some layers": (
        Qwen3MoeConfig,
        {**QWEN, "mlp_only_layers": [1], "attention_bias": True, "use_sliding_window": True, "sliding_window": 11},
    ),
    "olmoe": (OlmoeConfig, {"num_experts": 6}),
    "olmoe normalized": (OlmoeConfig, {"num_experts": 6, "norm_topk_prob": True, "attention_bias": True}),
    "granitemoe": (
        GraniteMoeConfig,
        {
            "num_local_experts": 6,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "tie_word_embeddings": True,
        },
    ),
}


def pair(config: PreTrainedConfig, folder: Path) -> tuple[torch.nn.Module, Model]:
    """The model of transformers with lively random weights, and ours with those that it saved in the folder."""
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in theirs.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    theirs.save_pretrained(folder)
    ours = models.build({**config.to_dict(), "architectures": [type(theirs).__name__]}, options())
    weights.load(ours, folder, load_format="auto", seed=0, report=lambda *_: None)
    return theirs, ours


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    config_type, differences = CASES[case]
    theirs, ours = pair(config_type(**{**SIZES, **differences}), tmp_path)
    token_ids = torch.randint(0, SIZES["vocab_size"], (NUM_TOKENS,))
    expected = theirs(token_ids.unsqueeze(0)).logits[0]
    whole = Stepper(ours).run(token_ids.tolist(), [NUM_TOKENS])
    torch.testing.assert_close(whole, expected, atol=5e-5, rtol=1e-5)
    assert torch.equal(whole.argmax(-1), expected.argmax(-1))
    assert torch.equal(Stepper(ours, page_size=4).run(token_ids.tolist(), [7, 20, 1, 19]), whole)
    together = Stepper(ours)
    requests = [Request(token_ids.tolist()), Request(token_ids.flip(0).tolist()), Request(token_ids[:9].tolist())]
    together.step([(request, count) for request, count in zip(requests, (30, 2, 9), strict=True)])
    together.step([(requests[1], 48), (requests[0], 20)])
    assert torch.equal(torch.stack(requests[0].logits), whole)
