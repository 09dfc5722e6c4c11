"""GGUF files whose weights stay quantized, compared with transformers and the dequantized weights.

Rules of a GPU run here on a CPU, with slower products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import aioengine
from aioengine import models, plugins
from aioengine.api.signatures import EngineArguments
from aioengine.layers.linear import Linear
from aioengine.model_files import folder_files
from aioengine.model_files.checkpoint import read_headers
from aioengine.model_files.gguf_header import BLOCKS
from aioengine.model_files.gguf_quantization import KEPT, StoredTypes
from aioengine.models._base import Model, ModelOptions
from aioengine.quantization.gguf import codes_of, gguf_formats
from aioengine.runner import weight_reading, weights
from aioengine.settings.memory_model import weights_bytes
from tests.compute.models.test_gguf import PROMPT, WIDE, described, logits_of, random_blocks, transformers_model
from tests.compute.quantized import assert_close
from tests.compute.stepping import Stepper, options
from tests.kit.gguf_files import write_model
from tests.kit.source import ROOT

BITS = {"Q4_0": 4 + 1, "Q4_K": 4 + 2, "Q8_0": 8 + 1, "Q6_K": 8 + 2}
"""Bits per weight in memory, with fp32 scales and offsets."""
MIXED = {"v_proj": "Q6_K", "down_proj": "Q6_K", "lm_head": "Q6_K", "embed_tokens": "Q8_0", "up_proj": "F16"}
SIZES = {**WIDE, "vocab_size": 320}


def build_model(path: Path, *, is_on_cpu: bool, dtype: torch.dtype = torch.float32) -> Model:
    """Build the model of a file. is_on_cpu: the weights of a CPU stay quantized, otherwise those of a GPU."""
    return models.build(
        folder_files.read_object(path / "config.json"),
        with_formats(options(dtype), StoredTypes.of(path, is_on_cpu=is_on_cpu)),
    )


def with_formats(model_options: ModelOptions, stored: StoredTypes) -> ModelOptions:
    format_of, table_format = gguf_formats(stored)
    return replace(model_options, format_of=format_of, table_format=table_format, mixes_formats=True)


def load(model: Model, path: Path) -> int:
    return weights.load(model, path, load_format="gguf", seed=0, report=lambda done, total: None)


def loaded(path: Path, *, is_on_cpu: bool) -> Model:
    model = build_model(path, is_on_cpu=is_on_cpu)
    load(model, path)
    return model


def our_logits(model: Model) -> Tensor:
    return Stepper(model).run(PROMPT, [])[-1]


def write(
    path: Path,
    family: str,
    kind: str,
    *,
    tied: bool = False,
    others: Mapping[str, str] | None = None,
    seed: int = 3,
    **sizes: int,
) -> torch.nn.Module:
    """Write a file. Return the model of transformers with its dequantized weights."""
    bias = {"attention_bias": True} if family == "llama" else {}
    model = transformers_model(family, seed=seed, tie_word_embeddings=tied, **bias, **{**SIZES, **sizes})
    for name, vector in model.named_parameters():
        if name.endswith("bias"):
            vector.data.uniform_(-0.5, 0.5)
    values = write_model(path, described(model), model.state_dict(), kind, other_kinds=others)
    model.load_state_dict(values, strict=not tied)
    return model


@pytest.mark.parametrize("is_on_cpu", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_are_those_of_the_dequantized_weights(
    family: str, kind: str, tied: bool, is_on_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of queries and keys of llama are in another order in the file."""
    monkeypatch.setattr(weight_reading, "PIECE_ELEMENTS", 40_000)  # a part of a matrix
    path = tmp_path / "model.gguf"
    expected = logits_of(write(path, family, kind, tied=tied))
    assert_close(our_logits(loaded(path, is_on_cpu=is_on_cpu)), expected, 4 if BITS[kind] < 8 else 32)


@pytest.mark.parametrize("is_on_cpu", [True, False])
def test_fused_layers_with_parts_of_different_types(is_on_cpu: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    expected = logits_of(write(path, "llama", "Q4_K", others=MIXED))
    model = loaded(path, is_on_cpu=is_on_cpu)
    assert_close(our_logits(model), expected, 4)


def test_parts_with_the_same_type_are_one_product() -> None:
    stored = StoredTypes({"q": "Q4_K", "k": "Q4_K", "v": "Q6_K"})
    layer = Linear(256, {"q": 32, "k": 16, "v": 16}, with_formats(options(), stored))
    layer.weights()
    assert [list(part.sizes) for part in layer.joined] == [["q", "k"], ["v"]]


@pytest.mark.parametrize("is_on_cpu", [True, False])
@pytest.mark.parametrize("kind", [*BITS, "BF16"])
def test_planned_bytes_are_those_of_the_loaded_model(kind: str, is_on_cpu: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "llama", kind, others={"v_proj": "Q6_K", "o_proj": "F16"})
    stored = StoredTypes.of(path, is_on_cpu=is_on_cpu)
    raw = folder_files.read_object(path / "config.json")
    tensors, tables = (
        partial(of, is_on_cpu=False) for of in (stored.tensors_in_memory, stored.table_in_memory)
    )  # without torch's factors for a CPU
    planned = weights_bytes(plugins.load("families", "llama").read(raw), 2, tensors, tables)
    assert planned == load(build_model(path, is_on_cpu=is_on_cpu, dtype=torch.bfloat16), path)


def test_bytes_of_each_type_on_a_gpu(tmp_path: Path) -> None:
    for kind, bits in BITS.items():
        path = tmp_path / f"{kind}.gguf"
        model = write(path, "qwen3", kind)
        targets = build_model(path, is_on_cpu=False).weights()
        matrices = {name: tensor for name, tensor in model.named_parameters() if tensor.dim() > 1}
        assert {name: targets[name].num_bytes for name in matrices} == {
            name: tensor.numel() * bits // 8 for name, tensor in matrices.items()
        }


def test_types_that_are_widened_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "llama", "Q4_K", others=MIXED)
    on_cpu, on_gpu = (StoredTypes.of(path, is_on_cpu=is_on_cpu) for is_on_cpu in (True, False))
    assert on_cpu.widened == ("Q6_K", "Q8_0")
    assert set(on_cpu.kept.values()) == {"Q4_K"}
    assert on_gpu.widened == ()
    assert set(on_gpu.kept.values()) == {"Q4_K", "Q6_K", "Q8_0"}


@pytest.mark.parametrize("is_on_cpu", [True, False])
def test_reopened_model_keeps_its_values_and_takes_new_ones(is_on_cpu: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "llama", "Q4_K", others=MIXED)
    model = loaded(path, is_on_cpu=is_on_cpu)
    before = our_logits(model)
    model.open_for_loading()
    model.finish_loading()
    torch.testing.assert_close(our_logits(model), before, rtol=1e-5, atol=1e-5)
    expected = logits_of(write(path, "llama", "Q4_K", others=MIXED, seed=9))
    model.open_for_loading()
    load(model, path)
    assert_close(our_logits(model), expected, 4)


def test_other_type_than_that_of_the_open_layer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "llama", "Q4_K")
    model = build_model(path, is_on_cpu=False)
    write(path, "llama", "Q6_K")
    with pytest.raises(ValueError, match="is of type Q6_K; allowed: Q4_K"):
        load(model, path)


@pytest.mark.parametrize("place", [0, 2])
def test_scale_or_offset_that_is_not_finite_is_refused(place: int, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "llama", "Q4_K")
    entry = next(entry for entry in read_headers(path, "") if entry.name.endswith("0.mlp.up_proj.weight"))
    content = bytearray(path.read_bytes())
    content[entry.begin + place : entry.begin + place + 2] = b"\x00\x7c"  # infinity in fp16
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.weight has numbers that are not finite"):
        loaded(path, is_on_cpu=False)


@pytest.mark.parametrize("kind", KEPT)
def test_codes_have_the_values_of_the_gguf_package(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    content = random_blocks(kind, 20)
    codes = codes_of(torch.frombuffer(content, dtype=torch.uint8).view(4, -1), kind)
    expected = gguf.quants.dequantize(np.frombuffer(content, np.uint8), gguf.GGMLQuantizationType[kind])
    assert torch.equal(codes.dequantized(torch.float32), torch.from_numpy(expected).view(4, -1))


def test_quantization_argument(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "llama", "Q4_0")
    options: EngineArguments = {"device": "cpu", "dtype": "bfloat16", "skip_tokenizer_init": True}
    named = aioengine.plan(path, quantization="gguf", **options)
    assert named.weights_bytes == aioengine.plan(path, **options).weights_bytes
    with pytest.raises(ValueError, match="'gguf' is a format of checkpoints, but the model has no"):
        aioengine.plan(quantization="gguf")


def test_bits_in_the_guide_are_those_of_the_code() -> None:
    page = (ROOT / "examples" / "guides" / "gguf.md").read_text()
    for kind, numbers in KEPT.items():
        size, block_bytes = BLOCKS[kind]
        bits = (4 if numbers.kind == "int4" else 8) + (1 + numbers.has_offsets) * 32 // numbers.group
        assert f"| {kind} | {block_bytes * 8 / size:g} | {bits} |" in page
