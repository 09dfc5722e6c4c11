"""Experts of quantized checkpoints are computed like the weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from aioengine.api.args import engine_config
from aioengine.families._experts import ExpertsConfig
from aioengine.kernels.codes import Codes
from aioengine.layers.expert_tensors import CodedExperts
from aioengine.layers.experts import SparseMLP
from aioengine.layers.layer import WHOLE, Placement, Shard
from aioengine.model_files.model_folder import find_facts
from aioengine.model_files.quantization import TEXTS, split_config
from aioengine.quantization._base import LinearSpec
from aioengine.quantization.stored import formats
from tests.compute.quantized import METHODS, assert_close, bits_of, quantize_checkpoint
from tests.compute.stepping import Stepper
from tests.compute.test_quantized_checkpoints import loaded
from tests.kit.grids import grid

CPU = torch.device("cpu")
PROMPT = [5, 9, 70, 31, 7, 8, 50]
NAMES = [name for name in METHODS if "order" not in name and name != "gptq-8"]
LAYERS = "proj", ".w1", ".w2", ".w3"
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 3, "initializer_range": 0.2,
}  # fmt: skip
FAMILIES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "mixtral": (MixtralConfig, {"num_local_experts": 5}),
    "qwen2_moe": (
        Qwen2MoeConfig,
        {"num_experts": 6, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    ),
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 6, "moe_intermediate_size": 192, "head_dim": 32}),
    "deepseek_v3": (
        DeepseekV3Config,
        {
            "n_routed_experts": 6, "moe_intermediate_size": 64, "q_lora_rank": 64, "kv_lora_rank": 32,
            "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        },
    ),
}  # fmt: skip


def save_family(family: str, folder: Path) -> dict[str, Tensor]:
    """Save a random model, and return its tensors."""
    torch.manual_seed(7)
    config_type, sizes = FAMILIES[family]
    AutoModelForCausalLM.from_config(config_type(**{**SIZES, **sizes}), dtype=torch.float32).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("qwen3_moe", name) for name in NAMES),
        *grid([("mixtral",), ("qwen2_moe",), ("deepseek_v3",)], [("awq",), ("fp8-blocks",)]),
    ],
)
def test_logits_are_those_of_the_dequantized_checkpoint(family: str, name: str, tmp_path: Path) -> None:
    method, tensors = METHODS[name], save_family(family, tmp_path)
    quantized, plain = quantize_checkpoint(tensors, method, LAYERS)
    assert len([name for name in quantized if "experts.4" in name]) > len(
        [name for name in plain if "experts.4" in name]
    )
    expected = Stepper(loaded(tmp_path, plain, None)).run(PROMPT, [4, 2])
    result = Stepper(loaded(tmp_path, quantized, method.config)).run(PROMPT, [4, 2])
    errors = (result - expected).norm(dim=1) / expected.norm(dim=1)
    limit = 0.1 if name == "w8a8" else 5e-2 if bits_of(name) == 4 else 1e-3
    assert errors.median() < limit  # rounded activations route some tokens to other experts


class _GivenCodes:
    """A format with these codes, one of each expert."""

    def __init__(self, *codes: Codes) -> None:
        self._codes = iter(codes)

    def empty(self, _layer: object) -> dict[str, Tensor]:
        return {}

    def kept(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors

    def codes(self, _layer: object, _tensors: object) -> Codes:
        return next(self._codes)


@pytest.mark.parametrize("first_has_offsets", [False, True])
def test_only_some_experts_have_offsets(first_has_offsets: bool) -> None:
    plain = Codes(torch.ones(4, 32, dtype=torch.int8), torch.ones(4, 1))
    shifted = plain._replace(offsets=torch.full((4, 1), 3.0))
    both = (shifted, plain) if first_has_offsets else (plain, shifted)
    given: Any = _GivenCodes(*both)
    joined = CodedExperts(given, ("down_proj",), LinearSpec(32, (4,), False, torch.float32, CPU), 2).assemble()
    expected = torch.cat([codes.dequantized(torch.float32) for codes in both])
    assert torch.equal(joined.dequantized(torch.float32), expected)


def loaded_layer(name: str, shard: Shard = WHOLE, num_inner: int = 128) -> tuple[SparseMLP, dict[str, Tensor]]:
    """Return a layer, or the part of a rank, and the tensors of the checkpoint."""
    method = METHODS[name]
    _, quantization = split_config({"quantization_config": method.config})
    assert quantization is not None
    config = ExpertsConfig(num_experts=3, top_k=2, inner_size=num_inner)
    placement = Placement(dtype=torch.float32, device=CPU, format_of=formats(quantization), shard=shard)
    layer = SparseMLP(64, config, placement)
    torch.manual_seed(0)
    shapes = {"gate_proj": (num_inner, 64), "up_proj": (num_inner, 64), "down_proj": (64, num_inner)}
    tensors = {
        f"experts.{expert}.{part}.{last}": tensor
        for expert in range(3)
        for part, shape in shapes.items()
        for last, tensor in method.quantize(torch.randn(shape) * 0.2).tensors.items()
    }
    tensors["gate.weight"] = torch.randn(3, 64)
    for target_name, target in layer.weights().items():
        if target_name.endswith(TEXTS):
            tensors[target_name] = functional.pad(
                tensors[target_name], (0, target.shape[-1] - len(tensors[target_name]))
            )
        target.tensor.copy_(tensors[target_name].view(target.shape)[target.index])
    layer.finish_loading()
    return layer, tensors


@pytest.mark.parametrize("name", NAMES)
def test_reopened_experts_have_the_loaded_tensors(name: str) -> None:
    layer, tensors = loaded_layer(name)
    x = torch.randn(9, 64)
    before = layer(x)
    layer.open_for_loading()
    for target_name, target in layer.weights().items():
        assert torch.equal(target.tensor, tensors[target_name].view(target.shape).to(target.tensor.dtype)), target_name
    layer.finish_loading()
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_have_a_part_of_each_expert(name: str) -> None:
    if name.endswith("-double"):
        with pytest.raises(ValueError, match="experts: ranks cannot divide quantized scales"):
            loaded_layer(name, Shard(0, 2), 256)
        return
    whole, *parts = [loaded_layer(name, shard, 256)[0] for shard in (WHOLE, Shard(0, 2), Shard(1, 2))]
    x = torch.randn(9, 64)
    assert_close(parts[0](x) + parts[1](x), whole(x), 4 if name == "w8a8" else bits_of(name))


def test_experts_with_act_order_are_refused(tmp_path: Path) -> None:
    save_family("qwen3_moe", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": METHODS["gptq-order"].config}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="quantization_config.desc_act True is not implemented.*false for experts"):
        find_facts(engine_config(str(tmp_path), {}).model, configs_only=True)


def test_reordered_inputs_are_refused_by_the_check_of_values() -> None:
    _, quantization = split_config({"quantization_config": METHODS["gptq"].config})
    assert quantization is not None
    experts = ExpertsConfig(num_experts=3, top_k=2, inner_size=128)
    layer = SparseMLP(64, experts, Placement(dtype=torch.float32, device=CPU, format_of=formats(quantization)))
    check = layer.weights("mlp.")["mlp.experts.1.down_proj.g_idx"].check
    assert check is not None
    groups = torch.arange(128) // 32
    check(groups)
    with pytest.raises(ValueError, match="reordered .*, which experts do not support"):
        check(groups.flip(0))


def test_experts_in_several_formats_are_refused() -> None:
    config = METHODS["awq"].config | {"modules_to_not_convert": ["experts.1.up_proj"]}
    _, quantization = split_config({"quantization_config": config})
    assert quantization is not None
    experts = ExpertsConfig(num_experts=3, top_k=2, inner_size=128)
    layer = SparseMLP(64, experts, Placement(dtype=torch.float32, device=CPU, format_of=formats(quantization)))
    with pytest.raises(ValueError, match="the experts mlp.experts have several formats"):
        layer.weights("mlp.")
