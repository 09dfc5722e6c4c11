"""The texts of single tokens, compared with the decoders of ``tokenizers``."""

from __future__ import annotations

from typing import Any

import pytest

from aioengine.text.token_table import byte_fallback_text, byte_level_text, read_decoder, read_token_table
from tests.unit.text.sample_tokenizers import ALL_SAMPLES, LETTERS, TABLE_SAMPLES, Sample, letters_of


@pytest.mark.parametrize("sample", TABLE_SAMPLES, ids=lambda sample: sample.name)
@pytest.mark.parametrize("skip", [True, False])
def test_text_of_every_token_after_another_one(sample: Sample, skip: bool) -> None:
    table = read_token_table(sample.file, skip_special_tokens=skip)
    assert table is not None
    anchor = sample.encode("a")
    before = sample.decode(anchor, skip_special_tokens=skip)
    for token_id in range(sample.num_ids):
        written = table[token_id]
        text = written if isinstance(written, str) else written.decode(errors="replace")
        whole = sample.decode([*anchor, token_id], skip_special_tokens=skip)
        assert whole == before + text, sample.tokenizer.id_to_token(token_id)


@pytest.mark.parametrize("sample", TABLE_SAMPLES, ids=lambda sample: sample.name)
def test_the_text_of_every_token_at_the_beginning(sample: Sample) -> None:
    table = read_token_table(sample.file, skip_special_tokens=True)
    assert table is not None
    for token_id in range(sample.num_ids):
        written = table.first(token_id)
        text = written.decode(errors="replace") if isinstance(written, bytes) else (written or "")
        if text.startswith(" " * table.num_stripped):
            text = text[table.num_stripped :]
        assert sample.decode([token_id]) == text


@pytest.mark.parametrize("sample", TABLE_SAMPLES, ids=lambda sample: sample.name)
def test_ids_outside_the_vocabulary_have_no_text(sample: Sample) -> None:
    table = read_token_table(sample.file)
    assert table is not None
    assert [table[sample.num_ids], table[10**9], table[-1]] == ["", "", ""]
    assert table.first(sample.num_ids) is None


def test_special_tokens_are_skipped_by_their_content() -> None:
    for sample in ALL_SAMPLES:
        end = sample.tokenizer.token_to_id("<|end|>")
        assert sample.decode([end]) == ""
        hiding, showing = (read_token_table(sample.file, skip_special_tokens=skip) for skip in (True, False))
        if hiding is not None and showing is not None:
            assert (hiding[end], hiding.first(end)) == ("", None)
            assert str(showing[end]).strip() == "<|end|>"


def test_byte_level_alphabet() -> None:
    assert [byte_level_text(LETTERS[byte]) for byte in range(128)] == [chr(byte) for byte in range(128)]
    assert [byte_level_text(LETTERS[byte]) for byte in range(128, 256)] == [bytes([byte]) for byte in range(128, 256)]
    assert byte_level_text(letters_of("Ünï ☃")) == "Ünï ☃"
    assert byte_level_text("a b") == "a b"  # a space is outside the alphabet: an added token writes itself
    assert byte_level_text("\xad☃") == "\xad☃"
    assert byte_level_text("") == ""


def test_byte_fallback_tokens() -> None:
    assert byte_fallback_text("<0x41>") == "A"
    assert byte_fallback_text("<0xe2>") == b"\xe2"
    for token in ("<0x4>", "<0x4G>", "<0x+5>", "<0x 5>", "<0x411>", "0x41", "<0x41", ""):
        assert byte_fallback_text(token) == token


REGEX_REPLACE = {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}
UNCOVERED: list[Any] = [
    {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
    {"type": "BPEDecoder", "suffix": "</w>"},
    REGEX_REPLACE,
    {
        "type": "Sequence",
        "decoders": [{"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}],
    },
    {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]},
    {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Metaspace", "replacement": "▁"}]},
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "Strip", "content": "_", "start": 1, "stop": 2},
    {"type": "SomethingNew"},
]


@pytest.mark.parametrize("decoder", UNCOVERED, ids=str)
def test_decoders_that_read_several_tokens_have_no_rule(decoder: Any) -> None:
    assert read_decoder(decoder) is None
    assert read_token_table({**TABLE_SAMPLES[0].file, "decoder": decoder}) is None


def test_old_spelling_of_metaspace() -> None:
    never = read_decoder({"type": "Metaspace", "replacement": "▁", "add_prefix_space": False})
    always = read_decoder({"type": "Metaspace", "replacement": "▁", "add_prefix_space": True})
    assert never is not None
    assert always is not None
    assert (never.text_of("▁a", is_first=True), never.has_first_rule) == (" a", False)
    assert (always.text_of("▁a", is_first=True), always.has_first_rule) == ("a", True)
