"""GGUF models: all weight types, and the logits of transformers for the same file."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from aioengine import models
from aioengine.kernels.gguf_blocks import dequantized
from aioengine.model_files import folder_files
from aioengine.model_files.gguf_header import BLOCKS
from aioengine.runner import weight_reading, weights
from tests.compute.runner_world import FAMILIES, World, make_settings
from tests.compute.stepping import Stepper, options
from tests.kit.gguf_files import KINDS, write_model
from tests.kit.tiny_sizes import SIZES

PROMPT = [5, 9, 200, 31, 7, 77, 12, 13]
WIDE = {
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def transformers_model(family: str, seed: int = 3, **changes: object) -> torch.nn.Module:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(FAMILIES[family](**{**SIZES, "head_dim": 16, **changes})).eval()


def described(model: torch.nn.Module) -> dict[str, object]:
    config: dict[str, object] = model.config.to_dict()
    return {"head_dim": config["hidden_size"] // config["num_attention_heads"], **config}


def logits_of(model: torch.nn.Module) -> Tensor:
    return model(torch.tensor([PROMPT])).logits[0, -1]


def our_logits(path: Path) -> Tensor:
    config = folder_files.read_object(path / "config.json")
    model = models.build(config, options())
    weights.load(model, path, load_format="auto", seed=0, report=lambda done, total: None)
    return Stepper(model).run(PROMPT, [])[-1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_all_weight_types_load(tmp_path: Path, family: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_reading, "PIECE_ELEMENTS", 3000)
    model = transformers_model(family, **WIDE)
    path = tmp_path / "model.gguf"
    values = write_model(path, described(model), model.state_dict(), kind)
    error = max(float((values[name] - tensor).abs().max()) for name, tensor in model.state_dict().items())
    assert error < {"F32": 1e-9, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 0.01, "Q6_K": 0.05}.get(kind, 0.2)
    model.load_state_dict(values)
    torch.testing.assert_close(our_logits(path), logits_of(model), rtol=1e-4, atol=1e-4)


def random_blocks(kind: str, num_blocks: int) -> bytearray:
    """Return blocks of random bytes with scales that are finite."""
    draw = random.Random(1)
    content = bytearray()
    for _ in range(num_blocks):
        block = bytearray(draw.randbytes(BLOCKS[kind][1]))
        for place in (0, 2, len(block) - 2):
            block[place : place + 2] = struct.pack("<e", draw.uniform(-2, 2))
        content += block
    return content


@pytest.mark.parametrize("kind", [kind for kind, (size, _) in BLOCKS.items() if size > 1])
def test_dequantized_blocks_match_the_gguf_package(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    content = random_blocks(kind, 20)
    expected = gguf.quants.dequantize(np.frombuffer(content, np.uint8), gguf.GGMLQuantizationType[kind])
    assert torch.equal(dequantized(torch.frombuffer(content, dtype=torch.uint8), kind), torch.from_numpy(expected))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_match_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    pytest.importorskip("gguf")
    changes = {} if family != "qwen3" else {"head_dim": 128}  # transformers uses it for all layers
    model = transformers_model(family, tie_word_embeddings=tied, **changes)
    write_model(
        tmp_path / "model.gguf", described(model), model.state_dict(), "Q8_0", {"tokenizer.ggml.tokens": ["a"] * 300}
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    torch.testing.assert_close(our_logits(tmp_path / "model.gguf"), logits_of(theirs), rtol=1e-4, atol=1e-4)
    expected = theirs.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)[0, len(PROMPT) :].tolist()
    assert World(make_settings(tmp_path / "model.gguf")).answers([PROMPT], max_new_tokens=8) == [expected]


def test_rope_factors_of_llama_3_are_read(tmp_path: Path) -> None:
    model = transformers_model(
        "llama", rope_parameters={**LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 1e4}
    )
    default = 1e4 ** (-torch.arange(8) / 8)
    factors = default / model.model.rotary_emb.inv_freq
    assert factors[-1] == pytest.approx(8)
    state = {**model.state_dict(), "rope_freqs.weight": factors}
    # its name is already that of llama.cpp
    write_model(tmp_path / "model.gguf", described(model), state, "F32")
    torch.testing.assert_close(our_logits(tmp_path / "model.gguf"), logits_of(model), rtol=1e-4, atol=1e-4)
    state["rope_freqs.weight"] = factors * 1.01
    write_model(tmp_path / "model.gguf", described(model), state, "F32")
    with pytest.raises(ValueError, match="rope_freqs.weight has factors that are not implemented"):
        our_logits(tmp_path / "model.gguf")


def test_norms_and_permuted_biases_load(tmp_path: Path) -> None:
    """Norms, and biases in the order of llama.cpp."""
    model = transformers_model("llama", attention_bias=True)
    for vector in model.parameters():
        if vector.dim() == 1:
            vector.data.uniform_(0.5, 1.5)
    state = model.state_dict()
    path = tmp_path / "model.gguf"
    values = write_model(path, described(model), state, "Q8_0", kind_of_vectors="Q8_0")
    assert not torch.equal(values["model.norm.weight"], state["model.norm.weight"])
    model.load_state_dict(values)
    torch.testing.assert_close(our_logits(path), logits_of(model), rtol=1e-4, atol=1e-4)


def test_duplicate_tensors_are_refused(tmp_path: Path) -> None:
    model = transformers_model("llama")
    state = model.state_dict()
    path = tmp_path / "model.gguf"
    write_model(path, described(model), {**state, "blk.00.attn_q.weight": torch.ones(64, 64)}, "F32")
    with pytest.raises(ValueError, match="'blk.0.attn_q.weight' and 'blk.00.attn_q.weight' are the same"):
        our_logits(path)


def test_mismatched_tensors_are_named_with_the_file(tmp_path: Path) -> None:
    model = transformers_model("qwen2")
    state = model.state_dict()
    path = tmp_path / "model.gguf"
    write_model(path, described(model), {**state, "model.layers.0.mlp.up_proj.weight": torch.ones(32, 64)}, "F32")
    with pytest.raises(ValueError, match=r"do not match config.json.*mlp\.up_proj\.weight has shape \[32, 64\]"):
        our_logits(path)
    state["model.norm.weight"][3] = torch.nan
    write_model(path, described(model), state, "F32")
    with pytest.raises(ValueError, match=r"model\.gguf: tensor output_norm\.weight has numbers that are not finite"):
        our_logits(path)
