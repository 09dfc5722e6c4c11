"""Weight formats other than plain work in layers, models and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from aioengine import models, plugins
from aioengine.families._block_config import LinearShape, TensorSpec, TensorSpecs
from aioengine.families._experts import ExpertsConfig, SharedConfig
from aioengine.families._tensors import adaptable_layers, checkpoint_tensors, expert_tensors, plain_tensors
from aioengine.families.llama import LlamaFamily
from aioengine.layers.experts import SparseMLP
from aioengine.layers.layer import Placement, Shard, Units, rank_ranges
from aioengine.layers.linear import Linear
from aioengine.model_files.checkpoint import check_entries, read_headers
from aioengine.model_files.quantization import Axis
from aioengine.models._base import Model, ModelOptions
from aioengine.quantization._base import LinearFormat, LinearSpec, PreparedLinear, Tensors
from aioengine.quantization.plain import PLAIN, plain
from aioengine.runner import weights
from aioengine.runner.weight_reading import read_all
from aioengine.settings.memory_model import weights_bytes
from tests.compute.runner_world import save_model
from tests.compute.stepping import Stepper
from tests.kit.decoders import config_of

CPU = torch.device("cpu")
PROMPT = [5, 9, 200, 31, 7, 8, 150]
IS_LINEAR = ("proj.weight", "lm_head.weight")


class Int8Format(LinearFormat):
    """Weight [O, D] in int8 with a scale [O] per output, dequantized in each call."""

    def empty(self, layer: LinearSpec) -> Tensors:
        num_outputs = sum(layer.sizes)
        weight = torch.empty(num_outputs, layer.in_features, dtype=torch.int8, device=layer.device)
        scale = torch.empty(num_outputs, dtype=torch.float32, device=layer.device)
        return {"weight": weight, "weight_scale": scale, **layer.empty_bias()}

    def split(self, layer: LinearSpec, name: str, tensor: Tensor) -> Sequence[Tensor]:
        return tensor.split(layer.sizes)

    def prepare(self, layer: LinearSpec, tensors: Tensors) -> PreparedLinear:
        def matmul(x: Tensor) -> Tensor:
            weight = tensors["weight"].to(x.dtype) * tensors["weight_scale"].to(x.dtype).unsqueeze(1)
            return functional.linear(x, weight, tensors.get("bias"))

        return layer.prepared(matmul, lambda: tensors, lambda new: None)


class TransposedFormat(LinearFormat):
    """Weight [D, O], split along its last dimension. The matmul reads a copy multiplied by 2."""

    def empty(self, layer: LinearSpec) -> Tensors:
        shape = layer.in_features, sum(layer.sizes)
        return {"weight": torch.empty(shape, dtype=layer.dtype, device=layer.device), **layer.empty_bias()}

    def split(self, layer: LinearSpec, name: str, tensor: Tensor) -> Sequence[Tensor]:
        return tensor.split(layer.sizes, dim=-1)

    def prepare(self, layer: LinearSpec, tensors: Tensors) -> PreparedLinear:
        doubled, bias = tensors["weight"] * 2, tensors.get("bias")

        def matmul(x: Tensor) -> Tensor:
            return x @ doubled * 0.5 if bias is None else x @ doubled * 0.5 + bias

        return layer.prepared(matmul, lambda: {**tensors, "weight": doubled / 2})


def int8_tensors(linear: LinearShape) -> TensorSpecs:
    """Describe a layer of ``Int8Format``; the head is not quantized."""
    specs = plain_tensors(linear)
    if linear.name != "lm_head":
        specs |= {"weight": specs["weight"]._replace(dtype="I8"), "weight_scale": TensorSpec((linear.outputs,))}
    return specs


def quantize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert a plain checkpoint to ``Int8Format``."""
    quantized: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith(IS_LINEAR):
            quantized[name] = tensor
            continue
        scale = tensor.abs().amax(1) / 127
        quantized[name] = (tensor / scale.unsqueeze(1)).round().to(torch.int8)
        quantized[f"{name}_scale"] = scale
    return quantized


def dequantize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert a checkpoint of ``Int8Format`` to a plain one."""
    return {
        name: tensor.float() * tensors[f"{name}_scale"].unsqueeze(1) if name.endswith(IS_LINEAR) else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale")
    }


def transpose(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert a plain checkpoint to ``TransposedFormat``."""
    return {name: tensor.T.contiguous() if name.endswith(IS_LINEAR) else tensor for name, tensor in tensors.items()}


def loaded(
    folder: Path, tensors: dict[str, Tensor], linear_format: LinearFormat, unquantized: tuple[str, ...] = ()
) -> Model:
    """Build the model of this folder's config with these weights. ``unquantized``: ends of names of plain layers."""

    def format_of(name: str) -> LinearFormat:
        return PLAIN if name.endswith(unquantized) else linear_format

    for old in folder.glob("*.safetensors"):
        old.unlink()
    save_file(tensors, folder / "model.safetensors")
    options = ModelOptions(dtype=torch.float32, device=CPU, max_positions=64, format_of=format_of)
    model = models.build(json.loads((folder / "config.json").read_text()), options)
    weights.load(model, folder, load_format="auto", seed=0, report=lambda done, total: None)
    return model


def logits_of(model: Model) -> Tensor:
    return Stepper(model).run(PROMPT, [4, 2])


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_int8_model_matches_the_dequantized_model(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path, tie_word_embeddings=False)
    quantized = quantize(load_file(tmp_path / "model.safetensors"))
    assert sum(tensor.dtype == torch.int8 for tensor in quantized.values()) == 2 * 7 + 1
    expected = logits_of(loaded(tmp_path, dequantize(quantized), PLAIN))
    model = loaded(tmp_path, quantized, Int8Format())
    torch.testing.assert_close(logits_of(model), expected, atol=3e-5, rtol=1e-5)


def test_transposed_model_matches_the_plain_model(tmp_path: Path) -> None:
    save_model("qwen2", tmp_path, tie_word_embeddings=False)
    plain = load_file(tmp_path / "model.safetensors")
    expected = logits_of(loaded(tmp_path, plain, PLAIN))
    model = loaded(tmp_path, transpose(plain), TransposedFormat())
    torch.testing.assert_close(logits_of(model), expected, atol=3e-5, rtol=1e-5)


def test_layers_of_a_model_have_the_format_for_their_name(tmp_path: Path) -> None:
    save_model("llama", tmp_path, tie_word_embeddings=False)
    plain_tensors = load_file(tmp_path / "model.safetensors")
    names = ("lm_head", "layers.1.mlp.down_proj", "layers.0.self_attn.o_proj")
    kept = {
        name: tensor for name, tensor in plain_tensors.items() if name.endswith(tuple(f"{n}.weight" for n in names))
    }
    assert len(kept) == 3
    quantized = quantize({name: tensor for name, tensor in plain_tensors.items() if name not in kept})
    expected = logits_of(loaded(tmp_path, dequantize(quantized) | kept, PLAIN))
    model = loaded(tmp_path, quantized | kept, Int8Format(), unquantized=names)
    torch.testing.assert_close(logits_of(model), expected, atol=3e-5, rtol=1e-5)
    with pytest.raises(
        ValueError, match=r"q_proj, .*k_proj, .*v_proj are one layer .* several formats; allowed: one format for all"
    ):
        loaded(tmp_path, quantized | kept, Int8Format(), unquantized=("layers.1.self_attn.k_proj",))


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_description_of_an_int8_checkpoint_matches_its_model(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path, tie_word_embeddings=False)
    plain_checkpoint = load_file(tmp_path / "model.safetensors")
    head = plain_checkpoint.pop("lm_head.weight")
    quantized = quantize(plain_checkpoint) | {"lm_head.weight": head}
    model = loaded(tmp_path, quantized, Int8Format(), unquantized=("lm_head",))
    config = plugins.load("families", family).read(json.loads((tmp_path / "config.json").read_text()))
    specs = checkpoint_tensors(config, int8_tensors)
    model.open_for_loading()
    assert {name: target.shape for name, target in model.weights().items()} == {
        name: spec.shape for name, spec in specs.items()
    }
    check_entries(read_headers(tmp_path, ""), specs, tmp_path)
    with pytest.raises(ValueError, match=r"weight_scale.*is of type I8; allowed: F64"):
        check_entries(read_headers(tmp_path, ""), checkpoint_tensors(config), tmp_path)
    save_file(plain_checkpoint | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: .*weight_scale.*is of type F32; allowed: I8"):
        check_entries(read_headers(tmp_path, ""), specs, tmp_path)


def test_description_of_int8_experts_matches_their_layer() -> None:
    """Of the layers of experts, only the shared expert has a format that keeps no codes."""
    shared = SharedConfig(inner_size=16, gate="shared_expert_gate")
    config = ExpertsConfig(num_experts=4, top_k=2, inner_size=24, shared=shared)
    int8 = Int8Format()
    placement = Placement(dtype=torch.float32, device=CPU, format_of=lambda name: int8)
    specs = expert_tensors(
        config, 32, "mlp.", lambda linear: (plain_tensors if ".experts." in linear.name else int8_tensors)(linear)
    )
    assert {name: target.shape for name, target in SparseMLP(32, config, placement).weights("mlp.").items()} == {
        name: spec.shape for name, spec in specs.items()
    }
    assert "mlp.shared_expert.up_proj.weight_scale" in specs


def test_weights_bytes_of_a_quantized_model_come_from_its_format() -> None:
    config = LlamaFamily.read(config_of("llama").to_dict())
    plain_bytes, int8_bytes = weights_bytes(config, 2), weights_bytes(config, 2, int8_tensors)
    linears = adaptable_layers(config).values()
    assert plain_bytes - int8_bytes == sum(outputs * inputs - 2 * outputs for outputs, inputs in linears)


def test_float_tensor_in_int8_checkpoint_is_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path, tie_word_embeddings=False)
    plain = load_file(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"is of type F32; allowed: I8"):
        loaded(tmp_path, quantize(plain) | {"lm_head.weight": plain["lm_head.weight"]}, Int8Format())


@pytest.mark.parametrize("linear_format", [PLAIN, Int8Format(), TransposedFormat()])
def test_reopened_layer_keeps_its_values_and_takes_new_ones(linear_format: LinearFormat) -> None:
    placement = Placement(dtype=torch.float32, device=CPU, format_of=lambda name: linear_format)
    layer = Linear(16, {"a": 8, "b": 24}, placement, bias=True)
    torch.manual_seed(0)
    first = {name: torch.randint(-9, 9, target.shape) for name, target in layer.weights("").items()}
    assert {"a.weight", "b.weight", "a.bias", "b.bias"} <= first.keys()
    for name, target in layer.weights("").items():
        target.tensor.copy_(first[name])
    layer.finish_loading()
    x = torch.randn(3, 16)
    before = layer(x)
    layer.open_for_loading()
    for name, target in layer.weights("").items():
        assert torch.equal(target.tensor, first[name].to(target.tensor.dtype)), name
    layer.finish_loading()
    assert torch.equal(layer(x), before)
    layer.open_for_loading()
    layer.weights("")["b.bias"].tensor.add_(2)
    layer.finish_loading()
    torch.testing.assert_close(layer(x), before + torch.tensor([0.0] * 8 + [2.0] * 24), atol=1e-4, rtol=1e-5)


def test_reopened_layer_keeps_matmul_and_tensors() -> None:
    """CUDA graphs contain their addresses."""
    int8 = Int8Format()
    layer = Linear(16, {"a": 8}, Placement(dtype=torch.float32, device=CPU, format_of=lambda name: int8))
    weight = layer.weights()["a.weight"].tensor
    layer.finish_loading()
    matmul = layer._matmul
    layer.open_for_loading()
    assert layer.weights()["a.weight"].tensor.data_ptr() == weight.data_ptr()
    layer.finish_loading()
    assert layer._matmul is matmul


@pytest.mark.parametrize("axis", ["inputs", "outputs"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_ranks_of_a_divided_layer_cover_the_layer(axis: Axis, has_bias: bool) -> None:
    torch.manual_seed(0)
    parts = {"q": 12, "k": 6}
    tensors: dict[str, Tensor] = {}
    x = torch.randn(5, 8)
    results: list[Tensor] = []
    for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
        placement = Placement(dtype=torch.float32, device=CPU, format_of=plain, shard=shard)
        layer = Linear(8, parts, placement, bias=has_bias, divided=axis)
        for name, target in layer.weights("").items():
            tensor = tensors.setdefault(name, torch.randn(target.shape))
            assert tensor.shape == target.shape
            target.tensor.copy_(tensor[target.index])
        layer.finish_loading()
        inputs = x.chunk(shard.size, -1)[shard.rank] if axis == "inputs" else x
        results.append(layer(inputs))
    expected, first, second = results
    if axis == "inputs":
        result = first + second
    else:
        pairs = zip(first.split([6, 3], -1), second.split([6, 3], -1), strict=True)
        result = torch.cat([part for pair in pairs for part in pair], -1)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("is_reordered", [False, True])
def test_rank_loads_its_heads_from_the_checkpoint(
    num_ranks: int, is_fused: bool, is_transposed: bool, is_reordered: bool, tmp_path: Path
) -> None:
    """4 query heads and 2 KV heads of 6 entries: with four ranks, two ranks have the same KV head."""
    torch.manual_seed(0)
    heads = [Units(4, 6), Units(2, 6), Units(2, 6)]
    parts = {"qkv": 48} if is_fused else {"q": 24, "k": 12, "v": 12}
    order = torch.arange(48).view(-1, 3, 2).transpose(1, 2).flatten() if is_reordered else None

    def layer_of(shard: Shard) -> Linear:
        placement = Placement(dtype=torch.float32, device=CPU, format_of=plain, shard=shard)
        layer = Linear(
            8, parts, placement, bias=True, divided="outputs", units=heads, order=order, is_transposed=is_transposed
        )
        read_all(read_headers(tmp_path, ""), layer.weights(""), lambda done, total: None)
        layer.finish_loading()
        return layer

    shapes = {name: (8, size) if is_transposed else (size, 8) for name, size in parts.items()}
    checkpoint = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    checkpoint |= {f"{name}.bias": torch.randn(size) for name, size in parts.items()}
    save_file(checkpoint, tmp_path / "model.safetensors")
    x = torch.randn(5, 8)
    whole = layer_of(Shard())(x)
    for rank in range(num_ranks):
        shard = Shard(rank, num_ranks)
        expected = torch.cat([whole[:, start:stop] for start, stop in rank_ranges(heads, shard)], -1)
        layer = layer_of(shard)
        torch.testing.assert_close(layer(x), expected)
        layer.open_for_loading()
        read_all(read_headers(tmp_path, ""), layer.weights(""), lambda done, total: None)
        layer.finish_loading()
        torch.testing.assert_close(layer(x), expected)


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match="6 units .* cannot be divided evenly among 4 ranks"):
        rank_ranges([Units(8, 16), Units(6, 16)], Shard(0, 4))
