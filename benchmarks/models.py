"""Model folders with random weights for the benchmarks: real architecture configs, a made-up tokenizer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, Qwen2Config

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


def write_model(folder: Path, config: Qwen2Config, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the model with seeded random weights unless the folder has it already; returns the folder."""
    if (folder / "model.safetensors").exists():
        return folder
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size, eos_token_id=config.eos_token_id)
    return folder


def write_tokenizer(folder: Path, vocab_size: int, *, eos_token_id: int) -> None:
    """A byte-level tokenizer in which every id of the vocabulary decodes to a few letters."""
    alphabet = sorted(ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    merges: list[tuple[str, str]] = []
    frontier = list(letters)
    while len(vocab) < vocab_size - 3:
        longer: list[str] = []
        for piece in frontier:
            for letter in letters:
                if len(vocab) < vocab_size - 3 and piece + letter not in vocab:
                    vocab[piece + letter] = len(vocab)
                    merges.append((piece, letter))
                    longer.append(piece + letter)
        frontier = longer
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [f"<|special_{index}|>" for index in range(eos_token_id - len(vocab))]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in [*specials, "<|end|>"]])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
