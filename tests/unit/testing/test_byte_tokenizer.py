"""The byte tokenizer, read by the tokenizers library."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from aioengine.testing.byte_tokenizer import BYTE_MODEL, EOS_TOKEN_ID, VOCAB_SIZE

ENDS_OF_RANGES = "\0 a~\x7f\x80é\u07ff\u0800東\ud7ff\ue000\uffff\U00010000🥖\U0010ffff"
"""Where UTF-8 begins to need one byte more, and surrogates lie."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BYTE_MODEL / "tokenizer.json"))


def test_the_vocabulary_is_all_bytes_and_the_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE == 261
    assert tokenizer.token_to_id("<eos>") == EOS_TOKEN_ID == 256


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


def test_the_folder_is_a_complete_model_folder() -> None:
    assert json.loads((BYTE_MODEL / "config.json").read_text())["vocab_size"] == VOCAB_SIZE
    assert json.loads((BYTE_MODEL / "generation_config.json").read_text())["eos_token_id"] == EOS_TOKEN_ID
    assert json.loads((BYTE_MODEL / "tokenizer_config.json").read_text())["eos_token"] == "<eos>"
