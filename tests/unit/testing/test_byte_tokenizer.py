"""The tokenizer of bytes, as the tokenizers library reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from aioengine.testing.byte_tokenizer import BOS_TOKEN_ID, EOS_TOKEN_ID, VOCAB_SIZE, byte_letters, write_tokenizer

ENDS_OF_RANGES = "\0 a~\x7f\x80é\u07ff\u0800東\ud7ff\ue000\uffff\U00010000🥖\U0010ffff"
"""Where UTF-8 begins to need one byte more, and surrogates lie."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write_tokenizer(tmp_path_factory.mktemp("byte_tokenizer"))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_the_vocabulary_is_all_bytes_and_the_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE == 261
    assert tokenizer.token_to_id("<eos>") == EOS_TOKEN_ID == 256
    assert tokenizer.token_to_id("<bos>") == BOS_TOKEN_ID
    assert len(set(byte_letters())) == 256


@given(st.text(ENDS_OF_RANGES))
def test_ids_are_the_bytes_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_one_id_and_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<eos>b").ids
    assert ids == [ord("a"), EOS_TOKEN_ID, ord("b")]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<eos>b"


def test_the_folder_is_a_complete_model_folder(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "new" / "folder", context_length=99)
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 99
    assert config["vocab_size"] == VOCAB_SIZE
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == EOS_TOKEN_ID
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<eos>"
