"""Families with experts match transformers, in fp32 with small random weights saved by transformers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from aioengine import models
from aioengine.api.args import engine_config
from aioengine.model_files.model_folder import find_facts
from aioengine.runner import weights
from aioengine.settings.planning import plan
from tests.compute.stepping import Stepper, check_bits, options
from tests.kit.decoders import random_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel

    from aioengine.models._base import Model

NUM_TOKENS = 50
SIZES: dict[str, Any] = {
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
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 6,
    "head_dim": 8,
    "sliding_window": 11,
    "swiglu_limit": 0.5,
    "hidden_size": 64,
}
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
    "gpt_oss": (GptOssConfig, GPT_OSS),
    "gpt_oss other windows": (
        GptOssConfig,
        {**GPT_OSS, "layer_types": ["full_attention", "sliding_attention", "full_attention"], "attention_bias": False},
    ),
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
    """Return a transformers model with random weights, and ours with the same weights."""
    theirs = random_model(config)
    theirs.save_pretrained(folder)
    ours = models.build({**config.to_dict(), "architectures": [type(theirs).__name__]}, options())
    weights.load(ours, folder, load_format="auto", seed=0, report=lambda *_: None)
    return theirs, ours


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_match_transformers(case: str, tmp_path: Path) -> None:
    config_type, differences = CASES[case]
    theirs, ours = pair(config_type(**{**SIZES, **differences}), tmp_path)
    token_ids = torch.randint(0, SIZES["vocab_size"], (NUM_TOKENS,))
    expected = theirs(token_ids.unsqueeze(0)).logits[0]
    whole = Stepper(ours).run(token_ids.tolist(), [NUM_TOKENS])
    torch.testing.assert_close(whole, expected, atol=5e-5, rtol=1e-5)
    assert torch.equal(whole.argmax(-1), expected.argmax(-1))
    check_bits(ours, token_ids, whole)


def save_mxfp4(folder: Path, **changes: object) -> PreTrainedModel:
    """Save a random gpt-oss with MXFP4 experts. Return transformers' model with the same weights."""
    sizes: dict[str, Any] = {**SIZES, **GPT_OSS, "intermediate_size": 32, "initializer_range": 0.2, **changes}
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(GptOssConfig(**sizes), dtype=torch.float32, attn_implementation="eager")
    stored = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, columns, rows = stored.pop(name).shape
        blocks = torch.randint(0, 256, (num_experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 126, (num_experts, rows, columns // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        theirs.state_dict()[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    theirs.config.save_pretrained(folder)
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return theirs


def test_mxfp4_experts_match_transformers(tmp_path: Path) -> None:
    theirs = save_mxfp4(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert find_facts(engine_config(str(tmp_path), {}).model).model_type == "gpt_oss"
    ours = models.build(config, options())
    weights.load(ours, tmp_path, load_format="auto", seed=0, report=lambda *_: None)
    wide = plan(str(tmp_path), device="cpu", dtype="bfloat16")
    small = plan(str(tmp_path), device="cuda", device_memory="80GiB", dtype="bfloat16")
    num_numbers = SIZES["num_hidden_layers"] * GPT_OSS["num_local_experts"] * 3 * 32 * GPT_OSS["hidden_size"]
    assert wide.weights_bytes - small.weights_bytes == num_numbers * 2 - num_numbers // 32 * 17
    token_ids = torch.randint(0, SIZES["vocab_size"], (NUM_TOKENS,))
    expected = theirs(token_ids.unsqueeze(0)).logits[0]
    torch.testing.assert_close(Stepper(ours).run(token_ids.tolist(), [NUM_TOKENS]), expected, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quantization_config", {"quant_method": "fp8"}),
        ("swiglu_limit", 0.0),
        ("num_experts_per_tok", 7),
        ("num_local_experts", 0),
        ("intermediate_size", 40),
    ],
)
def test_unsupported_gpt_oss_values_are_refused_by_name(field: str, value: object) -> None:
    config = GptOssConfig(**{**SIZES, **GPT_OSS, "intermediate_size": 32}).to_dict()
    config |= {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}, field: value}
    with pytest.raises(ValueError, match=field):
        models.build(config, options())


@pytest.mark.parametrize(
    ("model_type", "config_type", "changes", "field"),
    [
        ("mixtral", MixtralConfig, {"num_local_experts": 0}, "num_local_experts 0 is not implemented"),
        ("mixtral", MixtralConfig, {"num_experts_per_tok": 9}, "num_experts_per_tok 9 .*1 to 8"),
        ("qwen2_moe", Qwen2MoeConfig, {"decoder_sparse_step": 0}, "decoder_sparse_step 0 .*at least 1"),
        ("qwen3_moe", Qwen3MoeConfig, {"num_experts": 0}, "num_experts 0 "),
        ("qwen3_moe", Qwen3MoeConfig, {"num_experts": None, "num_local_experts": 2}, "num_experts_per_tok 3 .*1 to 2"),
    ],
)
def test_experts_that_cannot_be_chosen_are_refused(
    model_type: str, config_type: Callable[..., PreTrainedConfig], changes: dict[str, object], field: str
) -> None:
    config = {**config_type(**SIZES).to_dict(), "model_type": model_type, **changes}
    with pytest.raises(ValueError, match=field):
        models.build(config, options())
