"""Ranks of a model with quantized weights compute the logits of one rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeConfig

from aioengine import models, plugins
from aioengine.api.args import engine_config
from aioengine.families._ranks import part_of
from aioengine.layers.layer import WHOLE, Shard, Target
from aioengine.model_files import folder_files
from aioengine.model_files.gguf_quantization import StoredTypes
from aioengine.model_files.model_folder import find_facts
from aioengine.model_files.online_quantization import Method, OnlineQuantization
from aioengine.model_files.quantization import read_quantization, split_config
from aioengine.models._base import Model
from aioengine.quantization.online import online_formats
from aioengine.quantization.stored import formats
from aioengine.runner import weights
from aioengine.settings.memory_model import weights_bytes
from tests.compute.quantized import METHODS, bits_of, quantize_checkpoint
from tests.compute.rank_threads import RankThreads, rank_threads
from tests.compute.stepping import Stepper, options
from tests.compute.test_gguf_quantization import MIXED, with_formats, write
from tests.compute.test_online_quantization import CONFIGS
from tests.compute.test_quantized_experts import save_family
from tests.kit.decoders import config_of, random_model

NUM_TOKENS = 12
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
EXPERTS = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "vocab_size": 96}
LAYERS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankThreads]:
    with rank_threads(2) as threads:
        yield threads


def logits_of(threads: RankThreads, make: Callable[[Shard], Model]) -> tuple[Tensor, Tensor]:
    """Return the logits [T, V] of one rank and of two."""
    token_ids = torch.randint(1, 96, (NUM_TOKENS,)).tolist()
    whole, ranks = make(WHOLE), [make(shard) for shard in threads.shards]
    first, second = threads.call(lambda rank: Stepper(ranks[rank], page_size=4).run(token_ids, [5, 4]))
    assert torch.equal(first, second)
    return Stepper(whole).run(token_ids, []), first


def load(raw: Mapping[str, object], folder: Path, shard: Shard, **fields: object) -> Model:
    model = models.build(raw, replace(options(max_positions=64), shard=shard, **fields))
    weights.load(model, folder, load_format="auto", seed=0, report=lambda *_: None)
    return model


def check_close(logits: tuple[Tensor, Tensor], limit: float) -> None:
    expected, result = logits
    assert (result - expected).norm() < limit * expected.norm()


@pytest.mark.parametrize(
    ("case", "name"),
    [
        *(("qwen3", name) for name in ("awq", "gptq", "packed-zeros", "fp8-blocks", "fp8", "nf4", "w8a8")),
        *(pytest.param("experts", name, marks=pytest.mark.slow) for name in ("fp8-blocks", "nf4")),
    ],
)
def test_ranks_of_stored_formats_match_one_rank(two_ranks: RankThreads, case: str, name: str, tmp_path: Path) -> None:
    method = METHODS[name]
    config = Qwen3MoeConfig(**EXPERTS) if case == "experts" else config_of(case, **SIZES)
    random_model(config).save_pretrained(tmp_path)
    quantized, _ = quantize_checkpoint(load_file(tmp_path / "model.safetensors"), method, LAYERS)
    save_file(quantized, tmp_path / "model.safetensors")
    raw, quantization = split_config(
        json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": method.config}
    )
    assert quantization is not None
    format_of = formats(quantization)
    logits = logits_of(two_ranks, lambda shard: load(raw, tmp_path, shard, format_of=format_of))
    check_close(logits, 0.1 if name == "w8a8" else 2e-2 if bits_of(name) == 4 else 1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "expected", "reason"),
    [
        ("awq", {}, (1, 2, 4), ""),
        ("awq", {"intermediate_size": 96}, (1,), "down_proj: ranks would divide 32 inputs that are stored together"),
        ("fp8-blocks", {}, (1, 2, 4), ""),
        ("fp8-blocks", {"head_dim": 64}, (1, 2), "q_proj: ranks would divide 128 outputs that are stored together"),
        ("fp8", {"head_dim": 64, "intermediate_size": 96}, (1, 2, 4), ""),
        ("gptq-order", {}, (1,), "o_proj: ranks cannot divide inputs that are reordered"),
        ("nf4-double", {}, (1,), "q_proj: ranks cannot divide quantized scales"),
    ],
)
def test_numbers_of_ranks(
    name: str, changes: dict[str, int], expected: tuple[int, ...], reason: str, tmp_path: Path
) -> None:
    raw = config_of("qwen3", **{**SIZES, **changes}).to_dict() | {"quantization_config": METHODS[name].config}
    raw["architectures"] = ["Qwen3ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    facts = find_facts(engine_config(str(tmp_path), {}).model, configs_only=True)
    assert facts.rank_counts == expected
    assert reason in facts.rank_sizes


@pytest.mark.parametrize(
    ("family", "expected", "reason"),
    [("qwen3_moe", (1, 2), ""), ("deepseek_v3", (1,), "mlp.down_proj: ranks would divide 32 inputs")],
)
def test_numbers_of_ranks_of_experts(family: str, expected: tuple[int, ...], reason: str, tmp_path: Path) -> None:
    """The router chooses several experts."""
    save_family(family, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": METHODS["awq"].config}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    facts = find_facts(engine_config(str(tmp_path), {}).model, configs_only=True)
    assert facts.rank_counts == expected
    assert reason in facts.rank_sizes


def test_plans_count_the_quantized_weights_of_a_rank() -> None:
    placed = replace(options(torch.bfloat16), device=torch.device("meta"), shard=Shard(0, 2))
    for config in (config_of("qwen3", **SIZES), Qwen3MoeConfig(**EXPERTS)):
        raw = config.to_dict()
        family = part_of(plugins.load("families", config.model_type).read(raw), 2)
        for name in ("awq", "fp8-blocks", "w8a8"):
            quantization = read_quantization(METHODS[name].config)
            model = models.build(raw, replace(placed, format_of=formats(quantization)))
            planned = weights_bytes(family, 2, quantization.tensors_of)
            assert planned == sum(_stored_bytes(target) for target in model.weights().values()), name
        online = OnlineQuantization(method="int4")
        format_of, table_format = online_formats(online)
        model = models.build(raw, replace(placed, format_of=format_of, table_format=table_format))
        planned = weights_bytes(family, 2, partial(online.tensors_in_memory, is_on_cpu=False), online.table_in_memory)
        assert planned == sum(target.num_bytes for target in model.weights().values())


def _stored_bytes(target: Target) -> int:
    """Return the bytes in the checkpoint, where scales have 16 bits."""
    return target.num_bytes // (2 if target.tensor.dtype == torch.float32 else 1)


@pytest.mark.parametrize(
    ("case", "method"),
    [
        ("llama", "fp8"),
        *((case, "int8") for case in ("qwen2 tied", "joined experts")),
        *((case, "int4") for case in ("qwen2 tied", "gpt2", "gpt_bigcode", "phi3", "latent", "delta net", "experts")),
    ],
)
def test_weights_that_are_quantized_while_loading(
    two_ranks: RankThreads, case: str, method: Method, tmp_path: Path
) -> None:
    """Ranks have their own scales, so their weights are as exact, but not equal."""
    random_model(CONFIGS[case]()).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    format_of, table_format = online_formats(OnlineQuantization(method=method))
    logits = logits_of(
        two_ranks, lambda shard: load(raw, tmp_path, shard, format_of=format_of, table_format=table_format)
    )
    check_close(logits, 0.5 if method == "int4" or case == "joined experts" else 0.1)


@pytest.mark.parametrize(
    ("kind", "tied", "is_on_cpu"),
    [
        ("Q4_0", False, True),
        ("Q4_K", True, True),
        ("Q6_K", True, False),
        ("mixed", False, True),
        ("mixed", False, False),
    ],
)
def test_numbers_of_gguf_files(two_ranks: RankThreads, kind: str, tied: bool, is_on_cpu: bool, tmp_path: Path) -> None:
    """is_on_cpu: the weights of a CPU stay quantized, otherwise the weights of a GPU."""
    path = tmp_path / "model.gguf"
    stored_kind, others = ("Q4_K", MIXED) if kind == "mixed" else (kind, None)
    write(path, "llama", stored_kind, tied=tied, others=others, head_dim=128, intermediate_size=512)
    raw = folder_files.read_object(path / "config.json")
    stored = StoredTypes.of(path, is_on_cpu=is_on_cpu)

    def make(shard: Shard) -> Model:
        model = models.build(raw, replace(with_formats(options(), stored), shard=shard))
        weights.load(model, path, load_format="gguf", seed=0, report=lambda *_: None)
        return model

    check_close(logits_of(two_ranks, make), 1e-4 if kind == "Q6_K" else 2e-2)


def test_blocks_of_gguf_files_are_not_divided(two_ranks: RankThreads, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "llama", "Q4_K")
    raw, stored = folder_files.read_object(path / "config.json"), StoredTypes.of(path, is_on_cpu=True)
    model = models.build(raw, replace(with_formats(options(), stored), shard=two_ranks.shards[0]))
    with pytest.raises(ValueError, match="would divide blocks of 256 inputs of tensor blk.0.attn_output.weight"):
        weights.load(model, path, load_format="gguf", seed=0, report=lambda *_: None)


@pytest.mark.parametrize("name", ["awq", "int4"])
def test_new_weights_replace_the_parts_of_ranks(two_ranks: RankThreads, name: str, tmp_path: Path) -> None:
    folders = [tmp_path / "old", tmp_path / "new"]
    for seed, folder in enumerate(folders):
        random_model(config_of("qwen2 tied", **SIZES), seed=seed).save_pretrained(folder)
        if name in METHODS:
            quantized, _ = quantize_checkpoint(load_file(folder / "model.safetensors"), METHODS[name], LAYERS)
            save_file(quantized, folder / "model.safetensors")
    raw = json.loads((folders[0] / "config.json").read_text())
    fields: dict[str, Any] = {}
    if name in METHODS:
        fields["format_of"] = formats(read_quantization(METHODS[name].config))
    else:
        fields["format_of"], fields["table_format"] = online_formats(OnlineQuantization(method="int4"))

    def results(ranks: list[Model]) -> list[Tensor]:
        return two_ranks.call(lambda rank: Stepper(ranks[rank], page_size=4).run([*range(1, 9)], [5]))

    old, expected = ([load(raw, folder, shard, **fields) for shard in two_ranks.shards] for folder in folders)
    before = results(old)
    for model in old:
        model.open_for_loading()
        weights.load(model, folders[1], load_format="auto", seed=0, report=lambda *_: None)
    for result, other, earlier in zip(results(old), results(expected), before, strict=True):
        assert torch.equal(result, other)
        assert not torch.equal(result, earlier)
