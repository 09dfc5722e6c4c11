"""A made-up tokenizer for the model folders of the benchmarks. No torch here: a frontend is measured without it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

if TYPE_CHECKING:
    from pathlib import Path


def write_tokenizer(folder: Path, vocab_size: int, *, eos_token_id: int) -> None:
    """Write a byte-level tokenizer in which every id of the vocabulary decodes to a few letters."""
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
