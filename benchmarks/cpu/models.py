"""Model folders with random weights for the benchmarks: real architecture configs, a made-up tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.tokenizer_files import write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

QWEN25_05B = Qwen2Config(
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=151936,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
    bos_token_id=151643,
    eos_token_id=151645,
)
TINY = Qwen2Config(
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=4096,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    bos_token_id=4094,
    eos_token_id=4095,
)


def write_config(folder: Path, config: Qwen2Config) -> Path:
    """Write config and tokenizer of the model, without weights, unless the folder has them. Return the folder."""
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        config.architectures = ["Qwen2ForCausalLM"]
        config.save_pretrained(folder)
        write_tokenizer(folder, config.vocab_size, eos_token_id=config.eos_token_id)
    return folder


def write_model(folder: Path, config: Qwen2Config, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the model with seeded random weights unless the folder has it already; returns the folder."""
    if (folder / "model.safetensors").exists():
        return folder
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size, eos_token_id=config.eos_token_id)
    return folder
