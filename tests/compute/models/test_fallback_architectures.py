"""All decoders of transformers with small random weights run or are refused, as listed in the guide."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aioengine.families._config import Task
from aioengine.models._fallback import TransformersModel, build_module, check_config
from tests.compute.stepping import Stepper, options
from tests.kit.source import ROOT

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GUIDE = ROOT / "examples" / "guides" / "fallback.md"
RUN = re.findall(r"`([^`]+)`", GUIDE.read_text().partition("\n## Tested models\n")[2].partition("\nThese ")[0])
REASONS = {
    "attention that does not use transformers' attention interface": "its attention does not go through",
    "states in addition to keys and values": "its layers keep states in addition to keys and values",
    "bidirectional attention": "its tokens attend to later ones",
    "an encoder and a decoder": "it has an encoder and a decoder",
    "models of several parts, where only one part is for text": "it has several models",
}
"""Heading of a list of refused models in the guide -> words of the error. Other errors are in one more list."""
OTHER_REASONS = "other reasons, stated in the error"
REFUSED = {
    model_type: bullet.partition(": ")[0]
    for bullet in GUIDE.read_text().partition("\nThese decoders ")[2].split("\n- ")[1:]
    for model_type in re.findall(r"`([^`]+)`", bullet)
}
SMALL = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 96),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 48),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim"), 80),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 6),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "bos_token_id"), 1),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "eos_token_id"), 2),
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "sliding_window": 8,
    "rotary_dim": 4,
    "pad_token_id": 0,
}
PART = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 80}
LOCAL_PART = {**PART, "hidden_size_global": 48}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 6, "mamba_d_head": 16},
    "granitemoehybrid": {"mamba_n_heads": 6, "mamba_d_head": 16},
    "mamba2": {"num_heads": 12},
    "zamba": {"num_hidden_layers": 12},
    "zamba2": {"num_hidden_layers": 54},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        **dict.fromkeys(("patcher_config", "global_config"), PART),
        **dict.fromkeys(("encoder_config", "decoder_config"), LOCAL_PART),
    },
    "blenderbot": {"encoder_attention_heads": 6, "decoder_attention_heads": 6},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROPE)},
    "dbrx": {
        "n_heads": 6,
        "n_layers": 3,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 48, "ffn_hidden_size": 32, "moe_top_k": 2},
    },
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 48, "moe_topk": 2},
    "qwen4_exp_text": {
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        **dict.fromkeys(("indexer_n_heads", "indexer_kv_heads"), 1),
        "indexer_head_dim": 8,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 32], "axial_pos_shape": [8, 8]},
    "xlm": {"n_words": 96, "emb_dim": 48},
    "xmod": {"is_decoder": True, "default_language": "en_XX", "pad_token_id": 1},
    "zaya": {"num_experts_per_tok": 1},
}
"""Model type -> further fields of its tiny config."""
NEEDED: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "num_kv_shared_layers": 30,
            **dict.fromkeys(("hidden_size_per_layer_input", "vocab_size_per_layer_input"), 0),
        }
    }
}
"""Model type -> required fields without a default."""
MAX_NUMBERS = 60_000_000
OPTIONAL = ("sliding_window", "q_lora_rank", "rotary_dim", "n_inner")
"""Sizes that are not set where the config leaves them out: that has a meaning of its own."""


def default(model_type: str) -> PreTrainedConfig:
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**NEEDED.get(model_type, {}))
    return config


def tiny(model_type: str) -> PreTrainedConfig:
    fields: dict[str, Any] = default(model_type).to_dict()
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**{**made_small(fields), **OWN.get(model_type, {})})
    return config


def made_small(fields: dict[str, Any]) -> dict[str, Any]:
    """Return small values for the sizes in ``fields``, also for parts of the model."""
    changed: dict[str, Any] = {
        name: size
        for name, size in SMALL.items()
        if name in fields
        and not isinstance(fields[name], list | dict)
        and (fields[name] is not None or name not in OPTIONAL)
    }
    for name, value in fields.items():
        if isinstance(value, dict) and name in ("text_config", "vision_config", "audio_config"):
            changed[name] = {**value, **made_small(value)}
    if "kv_lora_rank" in fields:
        changed["num_key_value_heads"] = 6
    if isinstance(fields.get("layer_types"), list):
        changed["layer_types"] = (list(dict.fromkeys(fields["layer_types"])) * 3)[:3]
    return changed


def outline_of(model_type: str) -> PreTrainedConfig:
    """Return its config with small sizes. Passes on errors of transformers."""
    config = tiny(model_type)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    if sum(parameter.numel() for parameter in outline.parameters()) > MAX_NUMBERS:
        message = f"too large with these sizes: {model_type}"
        raise ValueError(message)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
@torch.inference_mode()
def test_logits_match_transformers_or_model_is_refused(model_type: str) -> None:
    try:
        check_config(default(model_type))
    except ValueError as error:
        check_refusal(model_type, str(error))
        return
    try:
        config = outline_of(model_type)
    except Exception as error:
        assert model_type not in RUN
        pytest.skip(f"no tiny model of it: {type(error).__name__}: {error}")
    try:
        module = build_module(type(config).from_dict(config.to_dict()), Task.GENERATE, options(max_positions=64))
        model = TransformersModel(module, Task.GENERATE, options(max_positions=64))
        model.weights()
    except ValueError as error:
        check_refusal(model_type, str(error))
    else:
        compare(model_type, model, config)


def check_refusal(model_type: str, message: str) -> None:
    begins = r"model_type '\w[^']*' cannot run with transformers' code here: |transformers converts \d+ tensors"
    assert re.match(begins, message), message
    reason = next((reason for reason, words in REASONS.items() if words in message), OTHER_REASONS)
    assert (model_type not in RUN, REFUSED.get(model_type)) == (True, reason), message


def compare(model_type: str, model: TransformersModel, config: PreTrainedConfig) -> None:
    """Check that logits with random weights match transformers."""
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in reference.named_parameters():
        is_norm = "norm" in name
        torch.nn.init.normal_(parameter, mean=1.0 if is_norm else 0.0, std=0.1 if parameter.ndim > 1 else 0.3)
    ids = torch.randint(3, config.get_text_config().vocab_size, (40,))
    check(model_type, model, reference, ids, reference(ids[None], use_cache=False).logits[0])


def check(model_type: str, model: TransformersModel, reference: Any, ids: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that the model returns the logits [40, V] of ``reference`` for ids [40]."""
    assert model_type in RUN
    assert model_type not in REFUSED
    tensors = revert_weight_conversion(reference, reference.state_dict())
    for name, target in model.weights().items():
        target.tensor.copy_(tensors[name])
    model.finish_loading()
    actual = Stepper(model, page_size=4).run(ids.tolist(), [5, 7, 1, 20])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
