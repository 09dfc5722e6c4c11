"""Families read config.json, and refuse unsupported values by name before any weight is read."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config, Qwen3Config

from aioengine import models, plugins
from aioengine.api.args import engine_config
from aioengine.families._tensors import adaptable_layers, checkpoint_tensors, is_ignored
from aioengine.model_files.model_folder import _context_length
from aioengine.models._decoder import DecoderModel
from aioengine.runner.device_memory import kv_cache_of
from aioengine.settings.memory_model import active_parameters, kv_cache, num_parameters, state_bytes
from tests.compute.stepping import options
from tests.kit import decoders
from tests.kit.hub_configs import HUB

CONFIGS = {config.model_type: config for config in (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config)}
EXPERT = re.compile(r"\.experts\.(\d+)\.")
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config_of(model_type: str, **fields: object) -> dict[str, object]:
    extra = {"sliding_window": None} if model_type == "mistral" else {}
    return {**CONFIGS[model_type](**SIZES, **extra).to_dict(), **fields}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_default_config_is_accepted(model_type: str) -> None:
    assert models.build(config_of(model_type), options()).vocab_size == 32


@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "tanh"),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"quant_method": "fp8"}),
        ("num_key_value_heads", 3),
        ("head_dim", 5),
        ("hidden_size", "wide"),
        ("rope_scaling", {"rope_type": "longrope", "factor": 4.0}),
        ("rope_scaling", {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5}),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", "linear"),
    ],
)
def test_unsupported_value_is_refused_by_name(model_type: str, field: str, value: object) -> None:
    named = "rope|factor" if field == "rope_scaling" else field
    with pytest.raises(ValueError, match=named):
        models.build(config_of(model_type, **{field: value}), options())


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("mistral", {"sliding_window": 128}, (128, 128)),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1, "layer_types": None},
            (None, 128),
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]},
            (128, None),
        ),
    ],
)
def test_sliding_windows_that_no_request_exceeds_are_dropped(
    model_type: str, fields: dict[str, object], expected: tuple[int | None, ...]
) -> None:
    config = config_of(model_type, **fields)
    assert models.build(config, options(max_positions=129)).attention_shape.windows == expected
    assert models.build(config, options(max_positions=128)).attention_shape.windows == ()


@pytest.mark.parametrize(
    ("case", "architecture"),
    [
        *((case, "ForCausalLM") for case in decoders.CASES),
        *((case, "ForSequenceClassification") for case in decoders.ONE_OF_EACH.values()),
        *((case, "Model") for case in decoders.ONE_OF_EACH.values()),
    ],
)
def test_tensor_shapes_match_the_tensors_that_models_load(case: str, architecture: str) -> None:
    config = decoders.config_of(case).to_dict()
    end = "LMHeadModel" if (config["model_type"], architecture) == ("gpt2", "ForCausalLM") else architecture
    config["architectures"] = [f"Any{end}"]
    model = models.build(config, options())
    assert isinstance(model, DecoderModel)
    decoder = plugins.load("families", config["model_type"]).read(config)
    specs = checkpoint_tensors(decoder)
    assert {name: spec.shape for name, spec in specs.items()} == {
        name: target.shape for name, target in model.weights().items()
    }
    for name in ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "model.norm.weight"):
        assert is_ignored(decoder, name) == model.is_ignored(name)
    parts = [
        (f"{prefix}{part}", (size, linear.spec.in_features))
        for prefix, linear in model.linears()
        for part, size in linear.sizes.items()
    ]
    assert adaptable_layers(decoder) == dict(parts)
    per_entry = {"blocks": 2, "scales": 0}  # of experts in MXFP4
    numbers = {name: target.tensor.numel() for name, target in model.weights().items()}
    assert num_parameters(decoder) == sum(
        count * per_entry.get(name.rpartition("_")[2], 1) for name, count in numbers.items()
    )
    assert kv_cache(decoder, 512) == kv_cache_of(model.attention_shape)
    states = 0 if model.state_shape is None else model.state_shape.num_bytes
    assert state_bytes(decoder, model.dtype.itemsize) == states


@pytest.mark.parametrize("name", ["gemma-2-2b-it", "DeepSeek-V2-Lite"])
def test_active_parameters_count_only_selected_experts(name: str) -> None:
    config = plugins.load("families", HUB[name]["model_type"]).read(HUB[name])
    numbers = {name: math.prod(spec.shape) for name, spec in checkpoint_tensors(config).items()}
    top_k = HUB[name].get("num_experts_per_tok", 0)
    idle = [count for name, count in numbers.items() if (match := EXPERT.search(name)) and int(match[1]) >= top_k]
    assert bool(idle) == (name == "DeepSeek-V2-Lite")
    assert active_parameters(config) == sum(numbers.values()) - sum(idle)


@pytest.mark.parametrize("name", HUB)
def test_hub_configs_are_read_like_transformers_reads_them(name: str) -> None:
    raw = HUB[name]
    read = plugins.load("families", raw["model_type"]).read
    assert read(raw) == read(AutoConfig.for_model(**raw).to_dict())


@pytest.mark.parametrize("model_type", [*decoders.ONE_OF_EACH, "mixtral"])
def test_default_rope_matches_transformers(model_type: str) -> None:
    config = decoders.config_of(decoders.ONE_OF_EACH[model_type]) if model_type != "mixtral" else MixtralConfig(**SIZES)
    raw = {name: value for name, value in config.to_dict().items() if name != "rope_parameters"}
    read = plugins.load("families", model_type).read
    assert read(raw) == read(AutoConfig.for_model(**raw).to_dict())


def test_gemma3_context_length_includes_the_scaling() -> None:
    decoder = plugins.load("families", "gemma3_text").read(HUB["gemma-3-12b-it, its text_config"])
    assert [rope.rope_type for rope in decoder.layer_ropes] == ["default"] * 5 + ["linear"]
    assert _context_length(decoder, Path()) == decoder.max_position_embeddings == 131_072


@pytest.mark.parametrize(
    ("model_type", "fields", "named"),
    [
        ("falcon", {"alibi": True}, "alibi"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("opt", {"word_embed_proj_dim": 12}, "word_embed_proj_dim 12.*hidden_size"),
        ("phi3", {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "factor"),
        ("phi3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("granite", {"residual_multiplier": 0.0}, "residual_multiplier"),
        ("granite", {"residual_multiplier": 1e308}, "residual_multiplier 1e.308.*1e-06 to 1e.06"),
        ("granite", {"logits_scaling": 1e-320}, "logits_scaling"),
        ("gemma3_text", {"attn_logit_softcapping": 30.0}, r"attn_logit_softcapping.; allowed: null$"),
        ("llama", {"rope_scaling": {"rope_type": "axial"}}, 'axial.*allowed: "default", "linear", "dynamic"'),
        ("llama", {"layer_types": ["other"] * 2}, 'layer_types.*allowed: null, "full_attention"'),
        ("gemma2", {"is_causal": False}, "is_causal"),
        ("llama", {"head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "head_dim 2.*dynamic"),
        ("llama", {"max_position_embeddings": 1, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "at least 2"),
        ("phi", {"tie_word_embeddings": True}, "tie_word_embeddings True"),
        ("gptj", {"tie_word_embeddings": True}, "tie_word_embeddings True"),
        ("llama", {"is_causal": None}, "is_causal"),
        ("llama", {"rope_parameters": {"rope_type": "x" * 10_000}}, "rope_type"),
        ("glm4", {"rope_parameters": None, "partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("stablelm", {"layer_norm_eps": 2.0}, "layer_norm_eps"),
        ("llama", {"per_layer_config": {"0": {"intermediate_size": 8}}}, "per_layer_config"),
        ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type 'linear'"),
        ("olmo3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate False"),
        ("phi3", {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2}, "layer_types"),
        ("starcoder2", {"sliding_window": 9, "layer_types": ["full_attention"] * 3}, "layer_types"),
        ("gemma2", {"is_causal": False, "architectures": ["Model"]}, "is_causal False.*windows"),
    ],
)
def test_unsupported_values_of_families_are_refused_by_name(
    model_type: str, fields: dict[str, object], named: str
) -> None:
    raw = decoders.config_of(decoders.ONE_OF_EACH[model_type]).to_dict()
    with pytest.raises(ValueError, match=named) as caught:
        models.build({**raw, **fields}, options())
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("model_type", ["gpt2", "gptj", "gpt_neox", "opt"])
def test_ignored_number_of_kv_heads_changes_nothing(model_type: str) -> None:
    raw = decoders.config_of(decoders.ONE_OF_EACH[model_type]).to_dict()
    read = plugins.load("families", model_type).read
    assert read({**raw, "num_key_value_heads": 1}) == read(raw)


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_bigcode", "gptj", "opt"])
def test_ignored_head_dim_changes_nothing(model_type: str) -> None:
    raw = decoders.config_of(decoders.ONE_OF_EACH[model_type]).to_dict()
    read = plugins.load("families", model_type).read
    assert read({**raw, "head_dim": 12}) == read(raw)


def test_every_model_has_a_family() -> None:
    assert {*plugins.names("models")} <= {*plugins.names("families")}


def test_huge_number_of_prediction_layers_is_refused() -> None:
    fields = {**SIZES, "model_type": "deepseek_v3", "num_key_value_heads": 4, "num_nextn_predict_layers": 2**40}
    fields |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
    with pytest.raises(ValueError, match="num_nextn_predict_layers 1099511627776 is not implemented"):
        models.build(fields, options())
    with pytest.raises(ValueError, match="n_shared_experts -1 is not implemented"):
        models.build({**fields, "num_nextn_predict_layers": 1, "n_shared_experts": -1}, options())


def test_missing_size_is_refused_by_name() -> None:
    config = config_of("llama")
    del config["intermediate_size"]
    with pytest.raises(ValueError, match="intermediate_size"):
        models.build(config, options())


def test_unknown_model_type_is_refused_with_supported_types() -> None:
    with pytest.raises(
        ValueError,
        match="'mamba'.*bert, .*llama, llava, .*mistral, .*modernbert, .*qwen2, .*qwen3, .*roberta, .*xlm_roberta",
    ):
        models.build({"model_type": "mamba"}, options())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, 2), ({"num_labels": 1}, 1), ({"num_labels": 3, "id2label": {"0": "a"}}, 1)],
)
def test_number_of_classifier_scores(fields: dict[str, object], expected: int) -> None:
    config = config_of("llama", architectures=["LlamaForSequenceClassification"])
    del config["id2label"]
    assert plugins.load("families", "llama").read({**config, **fields}).num_labels == expected


def test_unsupported_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="LlamaForQuestionAnswering"):
        models.build(config_of("llama", architectures=["LlamaForQuestionAnswering"]), options())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_constructors_accept_torch_dtypes(dtype: torch.dtype) -> None:
    assert engine_config(None, {"dtype": dtype}).model.dtype == str(dtype).removeprefix("torch.")


HUB_QWEN = {
    "vocab_size": 152_064,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128_000,
    "rope_theta": 1e6,
    "use_sliding_window": False,
    "sliding_window": 32_768,
    "tie_word_embeddings": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
}


def test_older_qwen_files_without_text_config_are_read() -> None:
    raw = {"model_type": "qwen2_5_vl", **HUB_QWEN, "vision_config": {"hidden_size": 1280}}
    config = plugins.load("families", "qwen2_5_vl").read(raw)
    assert config.rope.mrope_section == (8, 12, 12)
    assert config.rope.rope_type == "default"
    assert (config.hidden_size, config.tied, config.num_axes, config.image_token_id) == (64, False, 3, 151_655)


def test_llava_defaults_match_transformers() -> None:
    raw = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}, "image_token_index": 31_999}
    actual = plugins.load("families", "llava").read(raw)
    wanted = LlamaConfig()
    assert (actual.hidden_size, actual.num_layers, actual.vocab_size) == (4096, 32, wanted.vocab_size)
    assert actual.image_token_id == 31_999


@pytest.mark.parametrize(
    ("model_type", "fields", "named"),
    [
        ("llava", {"vision_config": {"model_type": "pixtral"}}, "vision_config.model_type 'pixtral'.*siglip"),
        ("llava", {"text_config": {"model_type": "gemma"}}, "text_config.model_type 'gemma'.*llama, mistral, qwen2"),
        ("llava", {"vision_feature_select_strategy": "cls"}, "vision_feature_select_strategy"),
        ("llava", {"image_token_index": 40_000}, "image_token_id 40000.*below the vocabulary"),
        ("llava", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ("qwen2_5_vl", {"rope_scaling": {"type": "mrope", "mrope_section": [8, 8, 8]}}, "mrope_section.*add up to 32"),
        ("qwen2_5_vl", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "mrope_section|rope_type"),
        ("qwen2_5_vl", {"vision_config": {"model_type": "siglip"}}, "vision_config.model_type 'siglip'"),
        ("qwen2_5_vl", {"text_config": "none"}, "text_config"),
        ("smolvlm", {"text_config": {"model_type": "mistral"}}, "text_config.model_type 'mistral'.*llama"),
        ("gemma3", {"text_config": {"model_type": "llama"}}, "text_config.model_type 'llama'.*gemma3_text"),
        ("gemma3", {"vision_config": {"model_type": "clip_vision_model"}}, "vision_config.model_type 'clip.*siglip"),
        ("gemma3", {"mm_tokens_per_image": 0}, "mm_tokens_per_image"),
        ("gemma3", {"vision_config": 5}, "vision_config"),
    ],
)
def test_unsupported_values_of_image_models_are_refused_by_name(
    model_type: str, fields: dict[str, object], named: str
) -> None:
    plain = HUB_QWEN if model_type == "qwen2_5_vl" else {}
    tower = {"model_type": "clip_vision_model"} if model_type == "llava" else {}
    raw = {"model_type": model_type, **plain, "vision_config": tower, **fields}
    with pytest.raises(ValueError, match=named):
        plugins.load("families", model_type).read(raw)
