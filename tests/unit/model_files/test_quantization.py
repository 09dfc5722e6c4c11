"""The schemes of layers, as read from ``quantization_config``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from aioengine.families._block_config import LinearShape, TensorSpec
from aioengine.model_files.quantization import Scheme, read_config, read_quantization, split_config

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def group(targets: list[str], **weights: object) -> dict[str, Any]:
    return {"targets": targets, "weights": {"num_bits": 8, "type": "float", "strategy": "channel", **weights}}


def test_layers_that_config_skips_are_not_quantized() -> None:
    quantization = read_quantization(FP8 | {"modules_to_not_convert": ["model.layers.1", "o_proj", "visual"]})
    for name in ("lm_head", "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.o_proj", "model.visual.blocks.0.q"):
        assert quantization.scheme_of(name) is None, name
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.10.mlp.up_proj", "model.layers.0.mlp.no_proj"):
        assert quantization.scheme_of(name) == Scheme(layout="fp8", group=-1), name


def test_layers_named_output_are_quantized() -> None:
    assert read_quantization(FP8).scheme_of("encoder.layer.0.attention.output.dense") is not None


def test_head_is_quantized_if_the_gptq_config_includes_it() -> None:
    assert read_quantization(GPTQ).scheme_of("lm_head") is None
    assert read_quantization(GPTQ | {"lm_head": True}).scheme_of("lm_head") is not None


def test_globs_of_modelopt_skip_layers() -> None:
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.0*"]}
    quantization = read_quantization(config)
    assert quantization.scheme_of("model.layers.0.mlp.up_proj") is None
    assert quantization.scheme_of("model.layers.1.mlp.up_proj") is not None


def test_groups_of_compressed_tensors_have_their_own_schemes() -> None:
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "a": group(["re:.*down_proj"], num_bits=4, type="int", strategy="group", group_size=64),
            "b": group(["Linear"]),
        },
        "ignore": ["lm_head", "re:.*self_attn.*"],
    }
    quantization = read_quantization(config)
    assert quantization.scheme_of("model.layers.0.mlp.down_proj") == Scheme(layout="packed", bits=4, group=64)
    assert quantization.scheme_of("model.layers.0.mlp.up_proj") == Scheme(layout="fp8")
    assert quantization.scheme_of("model.layers.0.self_attn.q_proj") is None
    assert quantization.scheme_of("lm_head") is None


def test_most_specific_target_of_compressed_tensors_counts() -> None:
    groups = {
        "a": group(["Linear"]),
        "b": group(["re:.*mlp.*"], strategy="tensor"),
        "c": group(["model.layers.0.mlp.up_proj"], strategy="block"),
    }
    quantization = read_quantization(COMPRESSED | {"config_groups": groups})
    assert quantization.scheme_of("model.layers.0.mlp.up_proj") == Scheme(layout="fp8", block=128)
    assert quantization.scheme_of("model.layers.0.mlp.down_proj") == Scheme(layout="fp8", group=-1)
    assert quantization.scheme_of("model.layers.0.self_attn.q_proj") == Scheme(layout="fp8")


def test_rules_of_gptq_change_and_skip_layers() -> None:
    dynamic = {
        r"+:.*\.18\..*gate.*": {"bits": 8, "group_size": 64},
        r"-:.*\.20\..*": None,
        r".*down": {"desc_act": True},
    }
    quantization = read_quantization(GPTQ | {"dynamic": dynamic})
    plain = quantization.scheme_of("model.layers.1.mlp.gate_proj")
    assert plain is not None
    assert (plain.bits, plain.group, plain.has_order) == (4, 128, False)
    assert quantization.scheme_of("model.layers.18.mlp.gate_proj") == replace(plain, bits=8, group=64)
    assert quantization.scheme_of("model.layers.20.mlp.down_proj") is None
    assert quantization.scheme_of("model.layers.1.mlp.down_proj") == replace(plain, has_order=True)


def test_slow_expression_is_refused() -> None:
    quantization = read_quantization(COMPRESSED | {"ignore": [r"re:(?:.|..)+\s"]})
    with pytest.raises(ValueError, match="quantization_config: .* takes too long to match"):
        quantization.scheme_of("model.layers.20.self_attn.q_proj")


def test_head_of_bitsandbytes_is_skipped_unless_other_layers_are_listed() -> None:
    assert read_quantization(BITSANDBYTES).scheme_of("lm_head") is None
    listed = read_quantization(BITSANDBYTES | {"llm_int8_skip_modules": ["model.layers.0.mlp"]})
    assert listed.scheme_of("lm_head") is not None
    assert listed.scheme_of("model.layers.0.mlp.up_proj") is None


def test_kv_cache_alone_may_be_quantized_by_modelopt() -> None:
    config = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    assert read_quantization(config).scheme_of("model.layers.0.mlp.up_proj") is None


def test_scales_of_the_kv_cache_are_announced_by_config() -> None:
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8"}
    assert read_quantization(modelopt | {"kv_cache_quant_algo": "FP8"}).has_kv_scales
    assert read_quantization(COMPRESSED | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}).has_kv_scales
    assert not read_quantization(modelopt).has_kv_scales


def test_older_file_of_modelopt_is_read(tmp_path: Path) -> None:
    assert read_config(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_config(tmp_path) == {"model_type": "llama"}
    (tmp_path / "hf_quant_config.json").write_text(
        '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}'
    )
    config = read_config(tmp_path)
    assert config is not None
    _, quantization = split_config(config)
    assert quantization is not None
    assert quantization.method == "modelopt"
    assert quantization.scheme_of("model.layers.0.mlp.up_proj") == Scheme(layout="fp8", group=-1)
    assert quantization.scheme_of("lm_head") is None


def test_tensors_of_a_layer_are_described() -> None:
    linear = LinearShape("model.layers.0.mlp.up_proj", 96, 256, has_bias=True)
    assert read_quantization(AWQ).tensors_of(linear) == {
        "qweight": TensorSpec((256, 12), "I32", per_element=8),
        "qzeros": TensorSpec((2, 12), "I32", per_element=0),
        "scales": TensorSpec((2, 96), "", per_element=0),
        "bias": TensorSpec((96,)),
    }
    blocks = read_quantization(FP8 | {"weight_block_size": [128, 128]}).tensors_of(linear)
    assert blocks["weight"] == TensorSpec((96, 256), "F8_E4M3")
    assert blocks["weight_scale_inv"] == TensorSpec((1, 2), "", per_element=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "quark"},
            "quant_method 'quark' .*allowed: fp8, .* gptq, .*and models that are not quantized",
        ),
        ({"quant_method": "torchao"}, "quant_method 'torchao' .*allowed: fp8, .*and models that are not quantized"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4' .*allowed: mxfp4 in models of type gpt_oss"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4' .*allowed: FP8, FP8_PER_CHANNEL"),
        (BITSANDBYTES | {"load_in_8bit": True}, "load_in_8bit True .*allowed: load_in_4bit, and models that are not"),
        (BITSANDBYTES | {"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type 'int4' .*allowed: nf4, fp4"),
        (BITSANDBYTES | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage .*allowed: uint8"),
        (FP8 | {"weight_block_size": [64, 64]}, r"weight_block_size \(64, 64\) .*allowed: \[128, 128\]"),
        (AWQ | {"version": "gemv"}, "version 'gemv' .*allowed: gemm"),
        (AWQ | {"bits": 8}, "bits 8 .*allowed: 4"),
        (AWQ | {"group_size": 0}, "group_size 0 .*allowed: at least 1, and -1"),
        (AWQ | {"zero_point": False}, "zero_point False .*allowed: true"),
        (GPTQ | {"bits": 3}, "bits 3 is not implemented; allowed: 4, 8"),
        (GPTQ | {"dynamic": {"+:x": {"bits": 2}}}, "bits 2 is not implemented; allowed: 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "format 'marlin' .*allowed: gptq, gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "format 'marlin' .*allowed: gptq, gptq_v2"),
        (GPTQ | {"format": "gptq_p", "checkpoint_format": "gptq"}, "format 'gptq_p' .*allowed: gptq, gptq_v2"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' .*allowed: pack-quantized"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask' .*allowed: dense"),
        (COMPRESSED | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config .*allowed: null"),
        (COMPRESSED | {"config_groups": {"a": {"targets": ["Embedding"]}}}, "targets 'Embedding' .*allowed: Linear"),
        (COMPRESSED | {"ignore": ["re:("]}, r"quantization_config: a list of layers has '.*\(.*invalid"),
        ({"bits": 4}, "quant_method"),
    ],
)
def test_formats_that_are_not_implemented_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_quantization(config)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"num_bits": 3}, "num_bits 3 .*allowed: 4, 8"),
        ({"strategy": "tensor_group"}, "strategy 'tensor_group' .*allowed: tensor"),
        ({"num_bits": 4}, "8 bits without groups"),
        ({"type": "nope"}, "type 'nope' .*allowed: int, float"),
        ({"actorder": "nope"}, "actorder 'nope' .*allowed: null, group, weight"),
        ({"type": "int", "num_bits": 4, "strategy": "tensor"}, "strategy 'tensor' .*allowed: channel, group"),
        ({"type": "int", "num_bits": 4, "strategy": "block"}, "strategy 'block' .*allowed: channel, group"),
        ({"type": "int", "num_bits": 4, "strategy": "group"}, "group_size None .*allowed: at least 1"),
        ({"type": "int", "num_bits": 4, "strategy": "group", "group_size": -7}, "group_size -7 .*allowed: at least 1"),
    ],
)
def test_groups_that_are_not_implemented_are_refused_by_name(weights: dict[str, Any], message: str) -> None:
    config = {"quant_method": "compressed-tensors", "config_groups": {"a": group(["Linear"], **weights)}}
    with pytest.raises(ValueError, match=message):
        read_quantization(config)


def test_integers_that_are_not_packed_need_activations_and_no_zero_points() -> None:
    weights = group(["Linear"], type="int")
    config = COMPRESSED | {"format": "int-quantized", "config_groups": {"a": weights}}
    with pytest.raises(ValueError, match="format 'int-quantized' .*allowed: pack-quantized, or .*input_activations"):
        read_quantization(config)
    weights["input_activations"] = {"num_bits": 8, "dynamic": True}
    assert read_quantization(config).scheme_of("up_proj") == Scheme(layout="int8")
    weights["weights"]["symmetric"] = False
    with pytest.raises(ValueError, match=r"weights\.symmetric False .*allowed: true with input_activations"):
        read_quantization(config)


def test_many_names_are_found_and_many_patterns_refused() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{expert}" for layer in range(100) for expert in range(100)]
    quantization = read_quantization(FP8 | {"modules_to_not_convert": names})
    assert quantization.scheme_of("model.layers.7.mlp.experts.99.up_proj") is None
    assert quantization.scheme_of("model.layers.7.mlp.experts.999.up_proj") is not None
    with pytest.raises(ValueError, match="more than 1000 patterns of layers"):
        read_quantization(FP8 | {"modules_to_not_convert": [f"{name}.*" for name in names]})


def test_config_is_split_from_its_quantization() -> None:
    raw = {"model_type": "llama", "quantization_config": FP8}
    rest, quantization = split_config(raw)
    assert rest == {"model_type": "llama"}
    assert quantization is not None
    assert quantization.method == "fp8"
    assert split_config(rest) == (rest, None)
    gpt_oss = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    assert split_config(gpt_oss) == (gpt_oss, None)  # the family reads the rest
