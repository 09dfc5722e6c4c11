"""Weights that are quantized while they are loaded, compared with a plain quantization of whole tensors."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GraniteMoeConfig, PreTrainedConfig, Qwen2MoeConfig, YoutuConfig

from aioengine import models, plugins
from aioengine.layers.layer import WHOLE, Placement, Shard
from aioengine.layers.linear import Linear
from aioengine.model_files.checkpoint import read_headers
from aioengine.model_files.online_quantization import Method, OnlineQuantization
from aioengine.model_files.quantization import Axis
from aioengine.models._base import Model, ModelOptions
from aioengine.quantization.online import online_formats
from aioengine.runner import weight_reading, weights
from aioengine.runner.weight_reading import read_all
from aioengine.settings.memory_model import weights_bytes
from tests.compute.models.test_hybrids import make_granite, make_lfm2, make_newer
from tests.compute.quantized import assert_close, rounded
from tests.compute.runner_world import LATENT_SIZES, save_model
from tests.compute.stepping import Stepper
from tests.kit import decoders
from tests.kit.grids import grid
from tests.kit.tiny_sizes import SIZES

CPU = torch.device("cpu")
METHODS: list[Method] = ["fp8", "int8", "int4"]
BITS = {"fp8": 32, "int8": 8, "int4": 4}
"""Bits of weights on a CPU, where fp8 is converted to the dtype."""
PROMPT = [5, 9, 2, 31, 7, 8, 15]
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    **{
        case: partial(decoders.config_of, case, **fields)
        for case, fields in {
            "llama": {},
            "qwen2 tied": {},
            "gpt2": {},
            "gpt_bigcode": {},
            "gpt_neox": {},
            "gptj": {},
            "phi3": {},
            "falcon": {},
            "opt": {"hidden_size": 96, "intermediate_size": 160},
            "starcoder2": {"hidden_size": 96, "intermediate_size": 160},
        }.items()
    },
    "latent": partial(YoutuConfig, **{**SIZES, **LATENT_SIZES}),
    "delta net": make_newer,
    "convolutions": make_lfm2,
    "mamba": make_granite,
    "experts": partial(
        Qwen2MoeConfig,
        **{**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
        shared_expert_intermediate_size=64,
    ),
    "joined experts": partial(GraniteMoeConfig, **{**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""Families with transposed, reordered, fused and tied weights, biases, states, and sizes that groups do not divide."""


def placement(method: Method, dtype: torch.dtype = torch.float32, shard: Shard = WHOLE, **fields: int) -> Placement:
    format_of, table_format = online_formats(OnlineQuantization(method=method, **fields))
    return Placement(dtype=dtype, device=CPU, format_of=format_of, table_format=table_format, shard=shard)


def options(method: Method | None, dtype: torch.dtype = torch.float32) -> ModelOptions:
    if method is None:
        return ModelOptions(dtype=dtype, device=CPU, max_positions=64)
    format_of, table_format = online_formats(OnlineQuantization(method=method))
    return ModelOptions(dtype=dtype, device=CPU, max_positions=64, format_of=format_of, table_format=table_format)


def load(folder: Path, method: Method | None, dtype: torch.dtype = torch.float32, load_format: str = "auto") -> Model:
    model = models.build(json.loads((folder / "config.json").read_text()), options(method, dtype))
    weights.load(model, folder, load_format=load_format, seed=0, report=lambda done, total: None)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("second", [16, 20])
@pytest.mark.parametrize("method", METHODS)
def test_product_is_that_of_the_rounded_weight(method: Method, second: int, group: int, dtype: torch.dtype) -> None:
    """torch's kernel for 4 bits needs a multiple of 16 outputs. One group of inputs is 0."""
    torch.manual_seed(0)
    layer = Linear(384, {"a": 48, "b": second}, placement(method, dtype, group_size=group), bias=True)
    tensors = {name: torch.randn(target.shape).to(dtype) for name, target in layer.weights().items()}
    tensors["a.weight"][3, :128] = 0.0
    for name, target in layer.weights().items():
        target.write(tensors[name])
    layer.finish_loading()
    weight = torch.cat([rounded(tensors[f"{part}.weight"], method, group if method == "int4" else 0) for part in "ab"])
    x = torch.randn(5, 384).to(dtype)
    expected = x.float() @ weight.T + torch.cat([tensors["a.bias"], tensors["b.bias"]]).float()
    assert_close(layer(x).float(), expected, BITS[method] if dtype == torch.float32 else 4)


@pytest.mark.parametrize("method", METHODS)
def test_row_of_a_layer_has_the_same_bits_in_any_batch(method: Method) -> None:
    torch.manual_seed(0)
    layer = Linear(1056, {"a": 48}, placement(method, torch.bfloat16))
    for target in layer.weights().values():
        target.write(torch.randn(target.shape))
    layer.finish_loading()
    x = torch.randn(70, 1056).bfloat16()
    alone = torch.cat([layer(row) for row in x.split(1)])
    for num_rows in (2, 7, 33, 70):
        assert torch.equal(layer(x[:num_rows]), alone[:num_rows]), num_rows


def test_inputs_that_groups_do_not_divide_get_smaller_groups_or_int8() -> None:
    quantization = OnlineQuantization(method="int4")
    assert [quantization.layer(inputs)[:2] for inputs in (256, 576, 96, 80)] == [
        ("int4", 128),
        ("int4", 64),
        ("int4", 32),
        ("int8", 0),
    ]


@pytest.mark.parametrize(("case", "method"), grid([(case,) for case in CONFIGS], [(method,) for method in METHODS]))
def test_logits_are_those_of_rounded_weights(case: str, method: Method) -> None:
    """At the end the weights are loaded again."""
    raw = CONFIGS[case]().to_dict()
    quantization = OnlineQuantization(method=method)
    quantized, plain = (models.build(raw, options(which)) for which in (method, None))
    prompt = [token % quantized.vocab_size for token in PROMPT]
    results: list[Tensor] = []
    for seed in (0, 1, 1):
        torch.manual_seed(seed)
        targets = quantized.weights()
        for name, target in plain.weights().items():
            weight = torch.randn(target.shape) * 0.1
            targets[name].write(weight)
            target.write(weight)
            if (writer := targets[name].writer) is not None:
                matrix = weight.T if writer.is_whole else weight.flatten(0, -2)
                is_head = name.startswith(("lm_head.", "embed_out.")) or "embed_tokens" in name or "wte" in name
                numbers = quantization.head if is_head else quantization.layer(matrix.shape[1])
                assert numbers is not None
                matrix = rounded(matrix, numbers.kind, numbers.group)
                target.write(matrix.T if writer.is_whole else matrix.view(weight.shape))
        for model in (quantized, plain):
            model.finish_loading()
            results.append(Stepper(model).run(prompt, [4, 2, 1]))
            model.open_for_loading()
        assert_close(results[-2], results[-1], BITS[method])
    assert torch.equal(results[2], results[4])
    assert not torch.allclose(results[0], results[2])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CONFIGS)
def test_planned_bytes_are_those_of_the_loaded_model(case: str, method: Method) -> None:
    raw = CONFIGS[case]().to_dict()
    model = models.build(raw, options(method, torch.bfloat16))
    quantization = OnlineQuantization(method=method)
    config = plugins.load("families", raw["model_type"]).read(raw)
    tensors = partial(quantization.tensors_in_memory, is_on_cpu=False)
    planned = weights_bytes(config, 2, tensors, quantization.table_in_memory)
    targets = model.weights().values()
    in_fp32 = [target.tensor.nbytes // 2 for target in targets if target.tensor.dtype == torch.float32]
    assert planned == sum(target.num_bytes for target in targets) - sum(in_fp32)
    assert planned < 0.92 * weights_bytes(config, 2)


def test_layers_that_are_quantized() -> None:
    def quantized(method: Method, **changes: object) -> set[str]:
        model = models.build(decoders.config_of("qwen2", **changes).to_dict(), options(method))
        return {name for name, target in model.weights().items() if target.writer is not None}

    names = *(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))
    layers = {f"model.layers.{layer}.{name}.weight" for layer in range(3) for name in names}
    head, table = {"lm_head.weight"}, {"model.embed_tokens.weight"}
    assert quantized("fp8", tie_word_embeddings=False) == quantized("fp8", tie_word_embeddings=True) == layers
    assert quantized("int4", tie_word_embeddings=False) == layers | head
    assert quantized("int4", tie_word_embeddings=True) == layers | table


def storages() -> dict[int, torch.UntypedStorage]:
    """Return the storages of all tensors by address."""
    storages_of_tensors = [value.untyped_storage() for value in gc.get_objects() if isinstance(value, Tensor)]
    return {storage.data_ptr(): storage for storage in storages_of_tensors}


@pytest.mark.parametrize(("method", "tied"), [("fp8", False), ("int8", True), ("int4", False)])
def test_unquantized_weights_are_never_in_memory(
    method: Method, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the tensors that are alive after each piece of a file is loaded."""
    save_model("qwen2", tmp_path, dtype=torch.bfloat16, tie_word_embeddings=tied, vocab_size=600)
    raw = json.loads((tmp_path / "config.json").read_text())
    plain_bytes = weights_bytes(plugins.load("families", "qwen2").read(raw), 2)
    monkeypatch.setattr(weight_reading, "PIECE_BYTES", 1024)
    before, counts = storages(), list[int]()

    def report(done: int, total: int) -> None:
        counts.append(sum(storage.nbytes() for address, storage in storages().items() if address not in before))

    model = models.build(raw, options(method, torch.bfloat16))
    num_bytes = weights.load(model, tmp_path, load_format="auto", seed=0, report=report)
    assert len(counts) > 50
    assert max(counts) < num_bytes + 0.2 * plain_bytes


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("method", METHODS)
def test_weights_that_are_not_finite_are_refused(method: Method, value: float, tmp_path: Path) -> None:
    save_model("qwen2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight has numbers that are not finite"):
        load(tmp_path, method)


@pytest.mark.parametrize("method", METHODS)
def test_files_and_pieces_of_rows_give_the_same_weights(
    method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("qwen2", tmp_path, dtype=torch.bfloat16)
    whole = Stepper(load(tmp_path, method)).run(PROMPT, [4])
    monkeypatch.setattr(weight_reading, "PIECE_BYTES", 1000)
    assert torch.equal(Stepper(load(tmp_path, method)).run(PROMPT, [4]), whole)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("axis", ["inputs", "outputs"])
def test_ranks_quantize_their_shares(axis: Axis, is_transposed: bool, method: Method, tmp_path: Path) -> None:
    torch.manual_seed(0)
    order = torch.arange(48).view(-1, 3, 2).transpose(1, 2).flatten() if axis == "outputs" else None
    weight, bias, x = torch.randn(48, 256), torch.randn(48), torch.randn(5, 256)
    tensors = {"a.weight": weight.T.contiguous() if is_transposed else weight, "a.bias": bias}
    save_file(tensors, tmp_path / "model.safetensors")
    group = 32 if method == "int4" else 0
    for rank in range(2):
        layer = Linear(
            256,
            {"a": 48},
            placement(method, shard=Shard(rank, 2), group_size=32),
            bias=True,
            divided=axis,
            order=order,
            is_transposed=is_transposed,
        )
        read_all(read_headers(tmp_path, ""), layer.weights(), lambda done, total: None)
        layer.finish_loading()
        if axis == "inputs":
            inputs = slice(128 * rank, 128 * rank + 128)
            expected = x[:, inputs] @ rounded(weight[:, inputs], method, group).T + bias * (rank == 0)
            result = layer(x[:, inputs])
        else:
            assert order is not None
            outputs = order[24 * rank : 24 * rank + 24]
            expected, result = x @ rounded(weight[outputs], method, group).T + bias[outputs], layer(x)
        assert_close(result, expected, BITS[method])
