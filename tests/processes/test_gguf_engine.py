"""A complete engine with the demo model as a GGUF file, including tokenizer and chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from aioengine import Engine
from aioengine.model_files.model_folder import DEMO_MODEL
from aioengine.tokenization.tokenizer import Tokenizer
from tests.kit.adapters import merged, save_adapter
from tests.kit.gguf_files import write_model

pytestmark = pytest.mark.process

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_new_tokens": 8}


def write_demo(path: Path, kind: str = "Q8_0", others: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """Write the demo model with matrices of one type, and others by the last part of their names. Return its values."""
    config, words, named = (
        json.loads((DEMO_MODEL / name).read_text())
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
    )
    vocab = words["model"]["vocab"]
    special = [token["content"] for token in words["added_tokens"]]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.__getitem__),
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in sorted(vocab, key=vocab.__getitem__)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in words["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.chat_template": named["chat_template"],
    }
    state = load_file(DEMO_MODEL / "model.safetensors")
    return write_model(path, config, state, kind, metadata, other_kinds=others)


def test_generate_and_chat(tmp_path: Path) -> None:
    path = tmp_path / "demo.gguf"
    write_demo(path)
    with Engine(path, device="cpu") as engine:
        info = engine.get_model_info()
        assert (info["model_path"], info["tokenizer_path"], info["load_format"]) == (str(path), str(path), "gguf")
        assert "Paris" in engine.generate(PROMPT, GREEDY)["text"]
        assert "Paris" in engine.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)["text"]
        json.loads(engine.generate("Write a JSON object for a person:", {"json_schema": '{"type": "object"}'})["text"])


@pytest.mark.slow
def test_answers_of_mixed_types_equal_those_of_dequantized_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With an adapter too. The parts of the attention layers have different types."""
    path, plain = tmp_path / "demo.gguf", tmp_path / "plain"
    values = write_demo(path, "Q4_K", {"v_proj": "Q6_K", "down_proj": "Q4_0"})
    shutil.copytree(DEMO_MODEL, plain)
    save_file(values, plain / "model.safetensors")
    demo, dequantized = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (DEMO_MODEL, plain)
    )
    adapter = str(save_adapter(demo, tmp_path / "adapter"))

    def answers(engine: Engine) -> list[list[int]]:
        return [answer["output_ids"] for answer in engine.generate([PROMPT] * 2, GREEDY, lora_path=[None, adapter])]

    def reference(model: PreTrainedModel) -> list[int]:
        ids = torch.tensor([Tokenizer(DEMO_MODEL).encode(PROMPT)])
        with torch.inference_mode():
            return model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()  # type: ignore[operator]

    expected = [reference(dequantized)]
    expected.append(reference(merged(dequantized, Path(adapter))))
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "quantization": "gguf"}
    with Engine(path, lora_paths=[adapter], log_level="info", **options) as engine:
        assert answers(engine) == expected
    assert "MB of weights (converted to float32: Q6_K)" in caplog.text
