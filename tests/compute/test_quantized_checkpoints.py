"""Checkpoints of every quantization method are read, and computed like the weights that they stand for."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aioengine import models, plugins
from aioengine.families._block_config import LinearShape
from aioengine.families._config import Task
from aioengine.kernels import code_linear
from aioengine.kernels.codes import Codes
from aioengine.layers.layer import Placement, Shard, Units
from aioengine.layers.linear import Linear
from aioengine.model_files.checkpoint import check_folder, read_headers
from aioengine.model_files.quantization import TEXTS, Axis, read_quantization, split_config
from aioengine.models._base import Model, ModelOptions
from aioengine.models._fallback import TransformersFolder
from aioengine.quantization._base import LinearSpec
from aioengine.quantization.plain import plain as plain_format
from aioengine.quantization.stored import formats
from aioengine.runner import weights
from tests.compute.quantized import METHODS, assert_close, bits_of, quantize_checkpoint, words
from tests.compute.runner_world import save_model
from tests.compute.stepping import Stepper
from tests.kit.decoders import config_of, random_model

CPU = torch.device("cpu")
INPUTS = 1088
"""Enough for sums whose order differs between row counts, and no multiple of 128."""
PROMPT = [5, 9, 200, 31, 7, 8, 150]


def loaded(folder: Path, tensors: dict[str, Tensor], quantization: object) -> Model:
    """Save a checkpoint of this folder's model, check it, and load it."""
    for old in folder.glob("*.safetensors"):
        old.unlink()
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    config, scheme = split_config(raw)
    check_folder(folder, plugins.load("families", plugins.file_name(raw["model_type"])).read(config), scheme)
    options = ModelOptions(dtype=torch.float32, device=CPU, max_positions=64)
    if scheme is not None:
        options = ModelOptions(dtype=torch.float32, device=CPU, max_positions=64, format_of=formats(scheme))
    model = models.build(config, options)
    weights.load(model, folder, load_format="auto", seed=0, report=lambda done, total: None)
    return model


def loaded_layer(name: str, dtype: torch.dtype) -> tuple[Linear, dict[str, Tensor]]:
    """Return a layer of two fused parts, and the tensors that were loaded into it."""
    method = METHODS[name]
    _, quantization = split_config({"quantization_config": method.config})
    assert quantization is not None
    layer = Linear(
        INPUTS, {"a_proj": 48, "b_proj": 32}, Placement(dtype=dtype, device=CPU, format_of=formats(quantization))
    )
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for part, size in (("a_proj", 48), ("b_proj", 32)):
        stored = method.quantize(torch.randn(size, INPUTS)).tensors
        tensors |= {f"{part}.{last}": tensor for last, tensor in stored.items()}
    for target_name, target in layer.weights().items():
        tensor = tensors[target_name]
        if target_name.endswith(TEXTS):
            tensor = tensors[target_name] = torch.nn.functional.pad(tensor, (0, target.shape[0] - len(tensor)))
        target.tensor.copy_(tensor.view(target.shape))
    layer.finish_loading()
    return layer, tensors


@pytest.mark.parametrize("name", METHODS)
def test_plan_keeps_weights_as_the_guide_says(name: str) -> None:
    """On a CPU, fp8 becomes weights in the dtype."""
    scheme = read_quantization(METHODS[name].config).scheme_of("model.layers.0.mlp.up_proj")
    assert scheme is not None
    for device in ("cpu", "cuda"):
        layer = LinearShape("up_proj", 32, 256, has_bias=False)
        specs = scheme.specs_in_memory(layer, is_on_cpu=device == "cpu")
        assert (specs["weight"].dtype == "") == (device == "cpu" and scheme.layout == "fp8"), device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", METHODS)
def test_reopened_layer_has_the_loaded_tensors(name: str, dtype: torch.dtype) -> None:
    layer, tensors = loaded_layer(name, dtype)
    x = torch.randn(3, INPUTS).to(dtype)
    before = layer(x)
    layer.open_for_loading()
    for target_name, target in layer.weights().items():
        assert torch.equal(target.tensor, tensors[target_name].view(target.shape).to(target.tensor.dtype)), target_name
    layer.finish_loading()
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize("name", ["channels", "fp8", "fp8-blocks", "fbgemm_fp8"])
def test_reopened_layer_with_a_scale_of_0_stays_finite(name: str) -> None:
    layer, _ = loaded_layer(name, torch.float32)
    layer.open_for_loading()
    for target_name, target in layer.weights().items():
        if "scale" in target_name:
            target.tensor.flatten()[0] = 0
    layer.finish_loading()
    x = torch.randn(3, INPUTS)
    before = layer(x)
    layer.open_for_loading()
    layer.finish_loading()
    assert before.isfinite().all()
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", METHODS)
def test_row_has_the_same_bits_in_any_batch(name: str, dtype: torch.dtype) -> None:
    layer, _ = loaded_layer(name, dtype)
    x = torch.randn(70, INPUTS).to(dtype)
    alone = torch.cat([layer(row) for row in x.split(1)])
    for num_rows in (2, 7, 33, 70):
        assert torch.equal(layer(x[:num_rows]), alone[:num_rows]), num_rows


def _divides(name: str, axis: Axis) -> bool:
    """Return whether ranks can divide the layers of a method."""
    has_order = name.endswith("-order") or name == "gptq-8"
    return not name.endswith("-double") and not (axis == "inputs" and has_order)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("axis", ["inputs", "outputs"])
def test_ranks_have_parts_of_codes_and_scales(name: str, axis: Axis, tmp_path: Path) -> None:
    """Two KV heads of 128 entries, of which each rank has one, and four query heads in another order."""
    method, sizes = METHODS[name], {"q_proj": 512, "k_proj": 256} if axis == "outputs" else {"o_proj": 48}
    _, quantization = split_config({"quantization_config": method.config})
    assert quantization is not None
    torch.manual_seed(0)
    tensors = {f"{part}.bias": torch.randn(size) for part, size in sizes.items()}
    for part, size in sizes.items():
        stored = method.quantize(torch.randn(size, 256)).tensors
        tensors |= {f"{part}.{last}": tensor.contiguous() for last, tensor in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    order, units = None, [Units(4, 64)]
    if axis == "outputs":
        order, units = torch.arange(768).view(-1, 2, 64).transpose(1, 2).flatten(), [Units(4, 128), Units(2, 128)]

    def layer_of(shard: Shard) -> Linear:
        placement = Placement(dtype=torch.float32, device=CPU, format_of=formats(quantization), shard=shard)
        layer = Linear(256, sizes, placement, bias=True, divided=axis, units=units, order=order)
        targets = layer.weights()
        entries = [entry for entry in read_headers(tmp_path, "") if entry.name in targets]
        weights.read(entries, targets, lambda done, total: None)
        layer.finish_loading()
        return layer

    if not _divides(name, axis):
        with pytest.raises(ValueError, match=r"ranks cannot divide (inputs that are reordered|quantized scales)"):
            layer_of(Shard(0, 2))
        return
    x = torch.randn(5, 256)
    whole, parts = layer_of(Shard())(x), [layer_of(Shard(rank, 2)) for rank in range(2)]
    for layer in parts:
        layer.open_for_loading()
        layer.finish_loading()
    if axis == "outputs":
        results = [layer(x).split([256, 128], 1) for layer in parts]
        torch.testing.assert_close(torch.cat([part for pair in zip(*results, strict=True) for part in pair], 1), whole)
    else:
        total = parts[0](x[:, :128]) + parts[1](x[:, 128:])
        assert_close(total, whole, 4 if name == "w8a8" else bits_of(name))


def test_ranks_check_the_order_of_the_inputs_of_all_ranks() -> None:
    _, quantization = split_config({"quantization_config": METHODS["gptq"].config})
    assert quantization is not None
    placement = Placement(dtype=torch.float32, device=CPU, format_of=formats(quantization), shard=Shard(0, 2))
    check = Linear(128, {"o_proj": 48}, placement, divided="inputs").weights()["o_proj.g_idx"].check
    assert check is not None
    groups = torch.arange(128) // 32
    for allowed in (groups, groups * 0, groups[[*range(63, -1, -1), *range(64, 128)]]):
        check(allowed)
    for order in (groups.flip(0), groups.clamp_max(2)):
        with pytest.raises(ValueError, match="do not have 32 inputs each"):
            check(order)


def test_ranks_do_not_divide_codes_that_are_stored_together(tmp_path: Path) -> None:
    quantization = read_quantization(METHODS["fp8-blocks"].config)
    placement = Placement(dtype=torch.float32, device=CPU, format_of=formats(quantization), shard=Shard(0, 2))
    layer = Linear(128, {"up_proj": 384}, placement, divided="outputs")
    with pytest.raises(ValueError, match="up_proj: ranks would divide 128 outputs that are stored together"):
        layer.weights()


@pytest.mark.parametrize("name", [name for name in METHODS if name != "w8a8"])
def test_loaded_tensors_are_freed_if_the_product_reads_others(name: str) -> None:
    _, quantization = split_config({"quantization_config": METHODS[name].config})
    assert quantization is not None
    linear_format = formats(quantization)("model.layers.0.mlp.up_proj")
    layer = LinearSpec(256, (48, 32), False, torch.float32, CPU)
    tensors = linear_format.empty(layer)
    for tensor_name, part in tensors.items():
        part.zero_()
        if tensor_name.endswith(TEXTS):
            text = b'{"blocksize": 64, "nested_blocksize": 256, "nested_offset": 0.5}'
            part[:, : len(text)] = torch.tensor(list(text))
    if (order := tensors.get("g_idx", tensors.get("weight_g_idx"))) is not None:
        order.copy_(torch.arange(256) // 32)
    largest = weakref.ref(max(tensors.values(), key=lambda tensor: tensor.nbytes))
    prepared = linear_format.prepare(layer, tensors)
    del tensors, part, order
    gc.collect()
    assert largest() is None
    assert prepared.matmul(torch.zeros(1, 256)).shape == (1, 80)


@pytest.mark.parametrize("name", METHODS)
def test_logits_are_those_of_the_dequantized_checkpoint(name: str, tmp_path: Path) -> None:
    method = METHODS[name]
    save_model("qwen2", tmp_path, tie_word_embeddings=False, intermediate_size=128)
    quantized, plain = quantize_checkpoint(load_file(tmp_path / "model.safetensors"), method)
    expected = Stepper(loaded(tmp_path, plain, None)).run(PROMPT, [4, 2])
    result = Stepper(loaded(tmp_path, quantized, method.config)).run(PROMPT, [4, 2])
    assert_close(result, expected, 4 if name == "w8a8" else bits_of(name))  # w8a8 rounds activations, too


@pytest.mark.parametrize("name", ["nf4", "nf4-double"])
@pytest.mark.parametrize("kind", ["fp4", None])
def test_another_type_than_that_of_the_file_is_refused(name: str, kind: str | None, tmp_path: Path) -> None:
    method = METHODS[name]
    save_model("qwen2", tmp_path, tie_word_embeddings=False, intermediate_size=128)
    quantized, _ = quantize_checkpoint(load_file(tmp_path / "model.safetensors"), method)
    config = method.config | {"bnb_4bit_quant_type": kind}
    with pytest.raises(
        ValueError, match=r"missing: \S*bitsandbytes__fp4.*not expected by this model: \S*bitsandbytes__nf4"
    ):
        loaded(tmp_path, quantized, config)


LATENT: dict[str, Any] = {"q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 16, "intermediate_size": 128}
"""Sizes that are multiples of the groups."""


@pytest.mark.parametrize("name", ["fp8-blocks", "gptq-order", "nf4-double", "w8a8", "channels"])
def test_latent_attention_reads_quantized_matrices(name: str, tmp_path: Path) -> None:
    method = METHODS[name]
    save_model("youtu", tmp_path, tie_word_embeddings=False, **LATENT)
    quantized, plain = quantize_checkpoint(load_file(tmp_path / "model.safetensors"), method)
    assert any("kv_b_proj" in tensor and tensor not in plain for tensor in quantized)
    expected = Stepper(loaded(tmp_path, plain, None)).run(PROMPT, [4, 2])
    model = loaded(tmp_path, quantized, method.config)
    result = Stepper(model).run(PROMPT, [4, 2])
    assert_close(result, expected, 4 if name == "w8a8" else bits_of(name))
    model.open_for_loading()
    for target_name, target in model.weights().items():
        stored = quantized[target_name].to(target.tensor.dtype).flatten()
        assert torch.equal(target.tensor.flatten()[: len(stored)], stored), target_name
    model.finish_loading()
    assert torch.equal(Stepper(model).run(PROMPT, [4, 2]), result)


@pytest.mark.parametrize(
    ("case", "name", "layers"),
    [
        *(("cohere", name, ("proj",)) for name in ("awq", "packed-zeros", "fp8-blocks", "gptq-order", "nf4")),
        *(("gpt2", name, ("c_attn", "c_fc", "c_proj")) for name in ("gptq", "gptq-order", "nf4-double")),
    ],
)
def test_outputs_are_in_the_order_of_other_families(
    case: str, name: str, layers: tuple[str, ...], tmp_path: Path
) -> None:
    method, sizes = METHODS[name], {"hidden_size": 64, "intermediate_size": 128}
    config = config_of(case, **sizes, num_attention_heads=4, vocab_size=304)
    random_model(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    quantized, plain = quantize_checkpoint(tensors, method, layers, is_transposed=case == "gpt2")
    assert quantized.keys() != plain.keys()
    expected = Stepper(loaded(tmp_path, plain, None)).run(PROMPT, [4, 2])
    result = Stepper(loaded(tmp_path, quantized, method.config)).run(PROMPT, [4, 2])
    assert_close(result, expected, bits_of(name))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gptq", {"lm_head": True}),
        ("channels", {"ignore": []}),
        ("packed", {"ignore": None}),
        ("nf4", {"llm_int8_skip_modules": ["visual"]}),
    ],
)
def test_head_may_be_quantized(name: str, changes: dict[str, object], tmp_path: Path) -> None:
    method = METHODS[name]
    save_model("qwen2", tmp_path, tie_word_embeddings=False, intermediate_size=128, vocab_size=304)
    tensors = load_file(tmp_path / "model.safetensors")
    quantized, plain = quantize_checkpoint(tensors, method, ("proj", "lm_head"))
    expected = Stepper(loaded(tmp_path, plain, None)).run(PROMPT, [4, 2])
    result = Stepper(loaded(tmp_path, quantized, method.config | changes)).run(PROMPT, [4, 2])
    assert_close(result, expected, bits_of(name))
    with pytest.raises(ValueError, match="do not match config.json: .*lm_head"):
        loaded(tmp_path, tensors, method.config | changes)


def test_zero_points_of_0_are_read_as_gptq_writes_them() -> None:
    """The library lowers words by 0x11111111 or 0x01010101, so a zero point of 0 borrows from the next one."""
    for bits, ones in ((4, 0x11111111), (8, 0x01010101)):
        config = {"quant_method": "gptq", "bits": bits, "group_size": 32}
        _, quantization = split_config({"quantization_config": config})
        assert quantization is not None
        linear_format = formats(quantization)("up_proj")
        spec = LinearSpec(32, (16,), False, torch.float32, CPU)
        zeros = torch.tensor([0, 7, 0, 0, 1, 0, 3, 9] * 2)[None]
        codes = torch.arange(32)[:, None].expand(32, 16) % (1 << bits)
        tensors = {
            "qweight": words(codes.T, bits).T.contiguous(),
            "qzeros": words(zeros, bits) - ones,
            "scales": torch.ones(1, 16),
            "g_idx": torch.zeros(1, 32, dtype=torch.int32),
        }
        prepared = linear_format.prepare(spec, dict(tensors))
        assert torch.equal(prepared.matmul(torch.eye(32)), (codes - zeros).float())
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in prepared.restore().items())


@pytest.mark.parametrize(
    ("name", "changes"),
    [("gptq-order", {}), ("nf4-double", {}), ("fp8-blocks", {"modules_to_not_convert": ["k_proj", "lm_head"]})],
)
def test_transformers_code_reads_quantized_linear_layers(name: str, changes: dict[str, object], tmp_path: Path) -> None:
    method = METHODS[name]
    save_model("qwen2", tmp_path, tie_word_embeddings=False, intermediate_size=128)
    tensors = load_file(tmp_path / "model.safetensors")
    layers = ("q_proj", "v_proj", "o_proj", "mlp") if changes else ("proj",)
    quantized, plain = quantize_checkpoint(tensors, method, layers)
    _, quantization = split_config({"quantization_config": method.config | changes})
    assert quantization is not None
    results: list[Tensor] = []
    for stored, format_of in ((plain, plain_format), (quantized, formats(quantization))):
        save_file(stored, tmp_path / "model.safetensors")
        options = ModelOptions(dtype=torch.float32, device=CPU, max_positions=64, format_of=format_of)
        folder = TransformersFolder(tmp_path, Task.GENERATE, trust_remote_code=False, has_weights=True)
        model = folder.load(options)
        weights.load(model, tmp_path, load_format="auto", seed=0, report=lambda done, total: None)
        results.append(Stepper(model).run(PROMPT, [4, 2]))
    assert_close(results[0], results[1], bits_of(name))


@pytest.mark.parametrize("name", METHODS)
def test_dummy_weights_have_finite_results(name: str, tmp_path: Path) -> None:
    save_model("qwen2", tmp_path, tie_word_embeddings=False, intermediate_size=128)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": METHODS[name].config}
    config, quantization = split_config(raw)
    assert quantization is not None
    options = ModelOptions(dtype=torch.float32, device=CPU, max_positions=64, format_of=formats(quantization))
    model = models.build(config, options)
    weights.load(model, tmp_path, load_format="dummy", seed=0, report=lambda done, total: None)
    assert Stepper(model).run(PROMPT, [7]).isfinite().all()


@pytest.mark.parametrize("name", METHODS)
def test_dummy_weights_have_the_spread_of_unquantized_ones(name: str) -> None:
    _, quantization = split_config({"quantization_config": METHODS[name].config})
    assert quantization is not None
    layer = Linear(1024, {"a": 256}, Placement(dtype=torch.float32, device=CPU, format_of=formats(quantization)))
    weights.fill_dummy(layer.weights(), seed=0)
    layer.finish_loading()
    columns = layer(torch.eye(1024))
    assert columns.std().item() == pytest.approx(1024**-0.5, rel=0.1)
    assert columns.mean().abs() < 0.2 * 1024**-0.5


KV_SCALES = {
    "model.layers.0.self_attn.k_proj.k_scale": 0.5,
    "model.layers.0.self_attn.v_proj.v_scale": 2.0,
    "model.layers.1.self_attn.k_scale": 0.25,
    "model.layers.1.self_attn.v_scale": 0.0,
}


@pytest.mark.parametrize("has_kv_scales", [True, False])
def test_scales_of_keys_and_values_are_read(has_kv_scales: bool, tmp_path: Path) -> None:
    """A scale of 0 means that no values were observed."""
    save_model("qwen2", tmp_path, num_hidden_layers=3)
    scales = {name: torch.tensor([scale]) for name, scale in KV_SCALES.items()}
    save_file(load_file(tmp_path / "model.safetensors") | scales, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    check_folder(tmp_path, plugins.load("families", "qwen2").read(config))
    options = ModelOptions(dtype=torch.float32, device=CPU, max_positions=64, has_kv_scales=has_kv_scales)
    model = models.build(config, options)
    weights.load(model, tmp_path, load_format="auto", seed=0, report=lambda done, total: None)
    loaded_scales = [scales.tolist() for scales in model.attention_shape.kv_scales]
    assert loaded_scales == ([[0.5, 2.0], [0.25, 1.0], [1.0, 1.0]] if has_kv_scales else [])


def test_blocks_in_other_formats_are_warmed_up(tmp_path: Path) -> None:
    method = METHODS["awq"]
    save_model("qwen2", tmp_path, num_hidden_layers=3, tie_word_embeddings=False)
    tensors = load_file(tmp_path / "model.safetensors")
    quantized, plain = quantize_checkpoint(tensors, method)
    last = "model.layers.2."
    kept = {name: tensor for name, tensor in quantized.items() if not name.startswith(last)}
    kept |= {name: tensor for name, tensor in plain.items() if name.startswith(last)}
    config = {**method.config, "modules_to_not_convert": [last.removesuffix(".")]}
    model: Any = loaded(tmp_path, kept, config)
    assert model._block_kinds == [0, 2]


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "message"),
    [
        ("awq", 80, 32, "a_proj, b_proj: 80 inputs with groups of 32 are not implemented"),
        ("awq", 64, 20, r"\(32, 20\) outputs are not implemented; multiples of 8 work"),
    ],
)
def test_incomplete_groups_and_words_are_refused(name: str, inputs: int, outputs: int, message: str) -> None:
    _, quantization = split_config({"quantization_config": METHODS[name].config})
    assert quantization is not None
    placement = Placement(dtype=torch.float32, device=CPU, format_of=formats(quantization))
    layer = Linear(inputs, {"a_proj": 32, "b_proj": outputs}, placement)
    for target in layer.weights().values():
        target.tensor.zero_()
    with pytest.raises(ValueError, match=message):
        layer.finish_loading()


def test_order_of_gptq_is_read_from_the_tensors(tmp_path: Path) -> None:
    """``desc_act`` may be missing. Files without an order may have zeros instead of the groups."""
    save_model("qwen2", tmp_path, tie_word_embeddings=False, intermediate_size=128)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("gptq-order", "gptq"):
        quantized, plain = quantize_checkpoint(tensors, METHODS[name])
        if name == "gptq":
            quantized |= {key: tensor.zero_() for key, tensor in quantized.items() if key.endswith("g_idx")}
        expected = Stepper(loaded(tmp_path, plain, None)).run(PROMPT, [4, 2])
        model = loaded(tmp_path, quantized, METHODS["gptq"].config)
        assert_close(Stepper(model).run(PROMPT, [4, 2]), expected, 4)


@pytest.mark.parametrize("bits", [0x7F, 0xFF])
def test_nan_in_fp8_is_refused_by_the_name_of_its_tensor(bits: int, tmp_path: Path) -> None:
    save_model("qwen2", tmp_path, tie_word_embeddings=False, intermediate_size=128)
    quantized, _ = quantize_checkpoint(load_file(tmp_path / "model.safetensors"), METHODS["fp8"])
    quantized["model.layers.1.mlp.up_proj.weight"].view(torch.uint8)[3, 5] = bits
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight has numbers that are not finite"):
        loaded(tmp_path, quantized, METHODS["fp8"].config)


def test_int8_rows_of_any_size_are_multiplied_in_bf16() -> None:
    """torch's kernel reads beyond the end of rows whose size is no multiple of 16."""
    torch.manual_seed(0)
    codes = Codes(torch.randint(-128, 128, (20, 100), dtype=torch.int8), torch.rand(20, 1) * 0.01)
    x = torch.randn(3, 100).bfloat16()
    expected = x.float() @ codes.dequantized(torch.float32).T
    result = code_linear.prepare(codes, None, torch.bfloat16).matmul(x)
    assert (result.float() - expected).norm() < 0.01 * expected.norm()
