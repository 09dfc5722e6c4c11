"""A whole engine with the demo model as a GGUF file, which has its tokenizer and its chat template too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from aioengine import Engine
from aioengine.model_files.model_folder import DEMO_MODEL
from tests.kit.gguf_files import write_model

pytestmark = pytest.mark.process

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_new_tokens": 8}


def write_demo(path: Path) -> None:
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
    write_model(path, config, load_file(DEMO_MODEL / "model.safetensors"), "Q8_0", metadata)


def test_generate_and_chat(tmp_path: Path) -> None:
    path = tmp_path / "demo.gguf"
    write_demo(path)
    with Engine(path, device="cpu") as engine:
        info = engine.get_model_info()
        assert (info["model_path"], info["tokenizer_path"], info["load_format"]) == (str(path), str(path), "gguf")
        assert "Paris" in engine.generate(PROMPT, GREEDY)["text"]
        assert "Paris" in engine.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)["text"]
        json.loads(engine.generate("Write a JSON object for a person:", {"json_schema": '{"type": "object"}'})["text"])
