"""The tokenizer: byte-level BPE, so that every text can be written, learned from the corpus itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.train_demo_model.documents import CHAT_TEMPLATE, END_OF_TEXT, SPECIAL_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from benchmarks.train_demo_model.documents import Document

# a word with the space before it, one digit, a run of signs, or white space
_PIECES = Regex(r" ?\p{L}[\p{L}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}\p{M}]+|\p{M}+|\s+(?!\S)|\s+")
_FIRST_RARE_CHARACTER = 0x2600


def _is_left_out(character: str) -> bool:
    """Every other character of the large sets (emoji, CJK, Hangul): it stays several tokens long.

    Real vocabularies have no room for all of them either, and text that arrives in parts of characters is what a
    streaming engine has to get right.
    """
    return ord(character) >= _FIRST_RARE_CHARACTER and ord(character) % 2 == 1


def _texts(documents: Sequence[Document]) -> Iterator[str]:
    for document in documents:
        text = "".join(segment.text for segment in document)
        for token in SPECIAL_TOKENS:
            text = text.replace(token, " ")
        yield "".join(" " if _is_left_out(character) else character for character in text)


def train_tokenizer(documents: Sequence[Document], vocab_size: int) -> Tokenizer:
    """A tokenizer of at most `vocab_size` tokens; the special ones have the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(documents), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, the latter with the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token != END_OF_TEXT],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(f"{text}\n", encoding="utf-8")
