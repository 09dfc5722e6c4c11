"""Families with latent attention match transformers, in fp32 with small random weights saved by transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    MiniCPM3Config,
    YoutuConfig,
)

from aioengine import models, plugins
from aioengine.families._latent import YoutuFamily
from aioengine.families._tensors import checkpoint_tensors, is_ignored
from aioengine.models import _decoder
from aioengine.runner import weights
from aioengine.runner.device_memory import kv_cache_of
from tests.compute.stepping import Stepper, check_bits, options

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedConfig

    from aioengine.models._base import Model

NUM_TOKENS = 50
SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    }
}
LONG = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.5, 2.0, 3.0],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    }
}
EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 3,
}
CASES: dict[str, tuple[Callable[..., PreTrainedConfig], dict[str, object]]] = {
    "youtu": (YoutuConfig, {"q_lora_rank": 28}),
    "youtu yarn, halves": (YoutuConfig, {**YARN, "rope_interleave": False, "tie_word_embeddings": False}),
    "youtu biases": (YoutuConfig, {"q_lora_rank": 28, "attention_bias": True, "v_head_dim": 8}),
    "minicpm3": (MiniCPM3Config, {"q_lora_rank": 28, "v_head_dim": None, "dim_model_base": 16, **LONG}),
    "minicpm3 no factors": (MiniCPM3Config, {"scale_emb": 1, "scale_depth": None, "dim_model_base": None}),
    "deepseek_v2": (DeepseekV2Config, {**EXPERTS, **YARN}),
    "deepseek_v2 groups": (
        DeepseekV2Config,
        {
            **EXPERTS,
            "q_lora_rank": 28,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v3": (DeepseekV3Config, {**EXPERTS, **YARN, "q_lora_rank": 28, "n_group": 4, "topk_group": 2}),
    "deepseek_v3 one group": (
        DeepseekV3Config,
        {**EXPERTS, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False},
    ),
    "glm4_moe_lite": (Glm4MoeLiteConfig, {**EXPERTS, "q_lora_rank": 28}),
    "glm4_moe_lite some layers": (Glm4MoeLiteConfig, {**EXPERTS, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
}


def pair(config: PreTrainedConfig, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, Model]:
    """Return a transformers model with large random weights, and ours loaded from the folder that it saved."""
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    for parameter in theirs.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn_like(buffer) * 0.2)
    theirs.save_pretrained(folder)
    ours = models.build({**config.to_dict(), "architectures": [type(theirs).__name__]}, options(dtype))
    weights.load(ours, folder, load_format="auto", seed=0, report=lambda *_: None)
    return theirs, ours


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_match_transformers(case: str, tmp_path: Path) -> None:
    config_type, differences = CASES[case]
    theirs, ours = pair(config_type(**{**SIZES, **differences}), tmp_path)
    token_ids = torch.randint(0, SIZES["vocab_size"] or 0, (NUM_TOKENS,))
    expected = theirs(token_ids.unsqueeze(0)).logits[0]
    whole = Stepper(ours).run(token_ids.tolist(), [NUM_TOKENS])
    torch.testing.assert_close(whole, expected, atol=5e-5, rtol=1e-5)
    assert torch.equal(whole.argmax(-1), expected.argmax(-1))
    check_bits(ours, token_ids, whole)


@pytest.mark.parametrize("case", ["youtu", "deepseek_v2", "deepseek_v3 one group"])
def test_attention_backend_can_apply_the_expansion(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is how a GPU runs, where the backend chooses the form."""
    monkeypatch.setattr(_decoder, "_has_forms", lambda placement: True)
    config_type, differences = CASES[case]
    theirs, ours = pair(config_type(**{**SIZES, **differences}), tmp_path)
    assert len(ours.attention_shape.expansions) == SIZES["num_hidden_layers"]
    token_ids = torch.randint(0, SIZES["vocab_size"] or 0, (NUM_TOKENS,))
    result = Stepper(ours).run(token_ids.tolist(), [30, 12])
    torch.testing.assert_close(result, theirs(token_ids.unsqueeze(0)).logits[0], atol=5e-5, rtol=1e-5)


def test_bf16_bits_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    _, ours = pair(YoutuConfig(**{**SIZES, "q_lora_rank": 28}), tmp_path, torch.bfloat16)
    token_ids = torch.randint(0, SIZES["vocab_size"] or 0, (NUM_TOKENS,))
    check_bits(ours, token_ids, Stepper(ours).run(token_ids.tolist(), [NUM_TOKENS]))


def test_kv_cache_holds_one_vector_per_token(tmp_path: Path) -> None:
    _, ours = pair(YoutuConfig(**SIZES), tmp_path)
    assert kv_cache_of(ours.attention_shape).elements_per_token == 3 * (24 + 8)
    raw = {**YoutuConfig(**SIZES).to_dict(), "architectures": ["YoutuForCausalLM"]}
    ours.open_for_loading()
    specs = checkpoint_tensors(YoutuFamily.read(raw))
    assert {name: target.shape for name, target in ours.weights().items()} == {
        n: spec.shape for n, spec in specs.items()
    }


def test_weights_can_be_reloaded(tmp_path: Path) -> None:
    """Some weights are reordered when they are loaded, others are not."""
    theirs, ours = pair(YoutuConfig(**{**SIZES, "q_lora_rank": 28}), tmp_path)
    token_ids = list(range(NUM_TOKENS))
    for parameter in theirs.parameters():
        parameter.mul_(1.1)
    expected = theirs(torch.tensor([token_ids])).logits[0]
    ours.open_for_loading()
    for name, target in ours.weights().items():
        torch.testing.assert_close(target.tensor * 1.1, theirs.state_dict()[name])
        target.tensor.copy_(theirs.state_dict()[name])
    ours.finish_loading()
    torch.testing.assert_close(Stepper(ours).run(token_ids, [NUM_TOKENS]), expected, atol=5e-5, rtol=1e-5)


REFUSED: dict[str, list[tuple[str, object]]] = {
    "youtu": [
        ("num_key_value_heads", 2),
        ("qk_rope_head_dim", 7),
        ("attention_bias", True),
        ("kv_lora_rank", 0),
        ("quantization_config", {"quant_method": "fp8"}),
    ],
    "deepseek_v2": [
        ("n_routed_experts", 0),
        ("norm_topk_prob", True),
        ("mlp_bias", True),
        ("moe_layer_freq", 2),
        ("topk_method", "noaux_tc"),
        ("scoring_func", "sigmoid"),
        ("rope_interleave", False),
        ("num_experts_per_tok", 9),
    ],
    "deepseek_v3": [
        ("n_group", 3),
        ("topk_group", 5),
        ("topk_group", 0),
        ("topk_method", "greedy"),
        ("scoring_func", "softmax"),
        ("moe_intermediate_size", 0),
        ("hidden_act", "gelu"),
        ("head_dim", 192),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ],
    "glm4_moe_lite": [("mlp_layer_types", ["dense"]), ("first_k_dense_replace", 2)],
}
CONFIGS = {
    config_class.model_type: config_class
    for config_class in (YoutuConfig, DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig)
}


def raw_config(model_type: str, **fields: object) -> dict[str, object]:
    groups = {"n_group": 4, "topk_group": 2} if model_type == "deepseek_v3" else {}
    sizes = SIZES if model_type == "youtu" else {**SIZES, **EXPERTS, **groups}
    return {**CONFIGS[model_type](**sizes).to_dict(), **fields}


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [(model_type, field, value) for model_type, refused in REFUSED.items() for field, value in refused],
)
def test_unsupported_latent_values_are_refused_by_name(model_type: str, field: str, value: object) -> None:
    read = plugins.load("families", model_type).read
    read(raw_config(model_type))
    with pytest.raises(ValueError, match=field):
        read(raw_config(model_type, **{field: value}))


def test_expert_groups_of_one_expert_are_refused() -> None:
    with pytest.raises(ValueError, match="n_group 8 is not implemented; allowed: at most 4"):
        plugins.load("families", "deepseek_v3").read(raw_config("deepseek_v3", n_group=8, topk_group=3))


def test_only_multi_token_prediction_layers_are_ignored() -> None:
    raw = raw_config("deepseek_v3", num_nextn_predict_layers=1)
    for model_type in ("deepseek_v3", "kimi_k2"):
        config = plugins.load("families", model_type).read(raw)
        assert is_ignored(config, "model.layers.3.eh_proj.weight")
        assert is_ignored(config, "model.layers.3.mlp.experts.0.up_proj.weight")
        assert not is_ignored(config, "model.layers.30.mlp.experts.0.up_proj.weight")
        assert not is_ignored(config, "model.layers.2.eh_proj.weight")
        assert models.build({**raw, "model_type": model_type}, options()).is_ignored("model.layers.3.norm.weight")
    without = plugins.load("families", "deepseek_v3").read({**raw, "num_nextn_predict_layers": 0})
    assert not is_ignored(without, "model.layers.3.eh_proj.weight")
