"""Incremental decoding, compared with decoding all ids at once, or with a byte-wise reference if that is wrong."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.text.detokenizer import (
    NUM_CONTEXT_TOKENS,
    Detokenizer,
    TableDetokenizer,
    WindowDetokenizer,
    make_detokenizer,
)
from aioengine.text.token_table import TokenTable, read_token_table
from tests.unit.text.sample_tokenizers import ALL_SAMPLES, TABLE_SAMPLES, TEXTS, UNFINISHED, Sample, text_added

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TABLES = {
    (sample.name, skip): table
    for sample in TABLE_SAMPLES
    for skip in (True, False)
    if (table := read_token_table(sample.file, skip_special_tokens=skip)) is not None
}
BYTE_SAMPLES = [sample for sample in TABLE_SAMPLES if sample.has_bytes]


def by_name(samples: list[Sample]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("sample", samples, ids=lambda sample: sample.name)


def pieces(ids: Sequence[int], cuts: Sequence[int]) -> Iterator[Sequence[int]]:
    """Cut ``ids`` at ``cuts``. Equal cuts result in empty pieces."""
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return (ids[start:end] for start, end in pairwise(edges))


def text_of(detokenizer: Detokenizer, parts: Iterator[Sequence[int]]) -> str:
    return "".join([detokenizer.push(part) for part in parts]) + detokenizer.flush()


def singly(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    return ([token_id] for token_id in ids)


def bytes_of(table: TokenTable, ids: Sequence[int]) -> bytes:
    return b"".join(text.encode() if isinstance(text := table[token_id], str) else text for token_id in ids)


@by_name(ALL_SAMPLES)
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_output_text_continues_the_prompt_at_every_split(sample: Sample, skip: bool, text: str) -> None:
    ids = sample.encode(text)
    whole = sample.decode(ids, skip_special_tokens=skip)
    table = TABLES.get((sample.name, skip))

    def decode(token_ids: Sequence[int]) -> str:
        return sample.decode(token_ids, skip_special_tokens=skip)

    for cut in range(len(ids) + 1):
        # if the prompt began a character, a ByteFallback decoder may also replace its earlier bytes by U+FFFD
        begun = next(text for back in range(4) if not (text := decode(ids[: cut - back])).endswith("\ufffd"))
        assert whole.startswith(begun)
        sources = [decode] if table is None else [decode, table]
        for source in sources:
            detokenizer = make_detokenizer(source, ids[:cut])
            given_out = [detokenizer.push([token_id]) for token_id in ids[cut:]]
            assert "\ufffd" not in "".join(given_out)
            assert begun + "".join(given_out) + detokenizer.flush() == whole, (cut, source)


@by_name(TABLE_SAMPLES)
@given(data=st.data())
def test_text_does_not_depend_on_the_pieces(sample: Sample, data: st.DataObject) -> None:
    skip = data.draw(st.booleans())
    table = TABLES[sample.name, skip]
    ids = data.draw(st.lists(st.integers(0, sample.num_ids + 1), max_size=12))
    prompt = data.draw(st.integers(0, len(ids)))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=5))
    whole = text_of(TableDetokenizer(table, ids[:prompt]), iter([ids[prompt:]]))
    assert text_of(TableDetokenizer(table, ids[:prompt]), pieces(ids[prompt:], cuts)) == whole
    assert text_of(TableDetokenizer(table, ids[:prompt]), singly(ids[prompt:])) == whole
    if not sample.has_bytes or sample.name == "byte-level":
        assert text_of(TableDetokenizer(table), singly(ids)) == sample.decode(ids, skip_special_tokens=skip)


HARD_BYTES = [0x20, 0x41, 0x80, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC3, 0xE0, 0xE2, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF]
HARD_BYTES += [0xBD, 0xBB, 0x82, 0x98, 0x8F]


@by_name(BYTE_SAMPLES)
@given(
    prompt=st.lists(st.sampled_from(HARD_BYTES), max_size=6), output=st.lists(st.sampled_from(HARD_BYTES), max_size=8)
)
def test_random_bytes_match_the_reference(sample: Sample, prompt: list[int], output: list[int]) -> None:
    table = TABLES[sample.name, True]
    first_byte = 0 if sample.name == "byte-level" else sample.tokenizer.token_to_id("<0x00>")
    anchor = sample.encode("a")  # so that no space is stripped at the beginning
    prompt_ids = [*anchor, *(first_byte + byte for byte in prompt)]
    output_ids = [first_byte + byte for byte in output]
    before = bytes_of(table, prompt_ids)
    detokenizer = TableDetokenizer(table, prompt_ids)
    text = ""
    for done, token_id in enumerate(output_ids, start=1):
        text += detokenizer.push([token_id])
        so_far = bytes(output[:done])
        certain = next(
            len(so_far) - size for size in (3, 2, 1, 0) if not size or (before + so_far)[-size:] in UNFINISHED
        )
        if certain >= 0:  # exactly the certain text was returned
            assert text == text_added(before, so_far[:certain])
        else:
            assert text == ""
    assert text + detokenizer.flush() == text_added(before, bytes(output))


@by_name(TABLE_SAMPLES)
@given(data=st.data())
def test_the_last_ids_of_a_prompt_are_enough_context(sample: Sample, data: st.DataObject) -> None:
    table = TABLES[sample.name, True]
    visible = [token_id for token_id in range(sample.num_ids) if table.first(token_id) is not None]
    prompt = data.draw(st.lists(st.sampled_from(visible), min_size=20, max_size=24))
    output = data.draw(st.lists(st.sampled_from(visible), max_size=5))
    whole = text_of(TableDetokenizer(table, prompt), singly(output))
    assert text_of(TableDetokenizer(table, prompt[-NUM_CONTEXT_TOKENS:]), singly(output)) == whole


@pytest.mark.parametrize("name", ["llama", "metaspace first", "metaspace always", "metaspace never", "gemma"])
def test_the_first_output_token_keeps_its_leading_space(name: str) -> None:
    sample = next(sample for sample in TABLE_SAMPLES if sample.name == name)
    word = [sample.tokenizer.token_to_id("▁"), sample.tokenizer.token_to_id("H")]
    prompt = [sample.tokenizer.token_to_id("a")]
    start = [sample.tokenizer.token_to_id("<s>")]
    table = TABLES[name, True]
    assert text_of(TableDetokenizer(table, prompt), singly(word)) == " H"
    keeps_space = name in ("gemma", "metaspace never")
    for nothing in ([], start):  # a prompt without text: the output is the beginning of the text
        assert text_of(TableDetokenizer(table, nothing), singly(word)) == (" H" if keeps_space else "H")
    assert text_of(TableDetokenizer(TABLES[name, False], start), singly(word)) == " H"


def test_character_begun_by_the_prompt_belongs_to_the_output() -> None:
    table = TABLES["byte-level", True]
    smile = "🙂".encode()
    for cut in (1, 2, 3):
        assert text_of(TableDetokenizer(table, [65, *smile[:cut]]), singly(smile[cut:])) == "🙂"
        assert text_of(TableDetokenizer(table, [65, *smile[:cut]]), singly([66])) == "B"
        assert text_of(TableDetokenizer(table, [65, *smile[:cut]]), singly([])) == ""
    assert text_of(TableDetokenizer(table, [65, *smile[:2]]), singly([smile[2], 66])) == "B"
    assert text_of(TableDetokenizer(table, [0xEF]), singly([0xBF, 0xBD])) == "\ufffd"  # an encoded U+FFFD
    assert text_of(TableDetokenizer(table, [0xE2, 0xFF]), singly([0x82, 66])) == "\ufffdB"


def test_unfinished_output_becomes_one_replacement_at_the_end() -> None:
    table = TABLES["byte-level", True]
    detokenizer = TableDetokenizer(table, [65])
    assert detokenizer.push([0xF0, 0x9F, 0x99]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    detokenizer = TableDetokenizer(table, [65])
    assert detokenizer.push([0xF0]) == ""
    assert detokenizer.push([66]) == "\ufffdB"  # it is certain at once


def test_a_skipped_token_does_not_end_a_character() -> None:
    sample = TABLE_SAMPLES[0]
    end = sample.tokenizer.token_to_id("<|end|>")
    ids = [0xC3, end, 0xA9]
    assert text_of(TableDetokenizer(TABLES["byte-level", True]), singly(ids)) == "é" == sample.decode(ids)
    assert text_of(TableDetokenizer(TABLES["byte-level", True], ids[:2]), singly(ids[2:])) == "é"
    shown = text_of(TableDetokenizer(TABLES["byte-level", False]), singly(ids))
    assert shown == "\ufffd<|end|>\ufffd" == sample.decode(ids, skip_special_tokens=False)


# ---------------------------------------------------------------- without a table


class CountingDecode:
    """Decodes, and counts the decoded ids."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.longest = 0

    def __call__(self, token_ids: Sequence[int], /) -> str:
        self.longest = max(self.longest, len(token_ids))
        return self.sample.decode(token_ids)


@by_name(ALL_SAMPLES)
def test_long_output_without_a_table_decodes_short_windows(sample: Sample) -> None:
    ids = [token_id for _ in range(6) for text in TEXTS for token_id in sample.encode(text)]
    whole = sample.decode(ids)
    decode = CountingDecode(sample)
    text = text_of(WindowDetokenizer(decode), singly(ids))
    assert text == whole
    assert decode.longest < 40


def test_only_the_end_of_a_long_prompt_is_decoded_without_a_table() -> None:
    sample = ALL_SAMPLES[-1]
    ids = sample.encode("Hello, my name is Ada. " * 50)
    decode = CountingDecode(sample)
    detokenizer = WindowDetokenizer(decode, ids[:-5])
    assert text_of(detokenizer, singly(ids[-5:])) == sample.decode(ids)[len(sample.decode(ids[:-5])) :]
    assert decode.longest <= 64


@by_name(BYTE_SAMPLES)
@given(data=st.data())
def test_without_a_table_the_split_into_pushes_does_not_change_the_text(sample: Sample, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, sample.num_ids - 1), max_size=12))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=5))
    whole = text_of(WindowDetokenizer(sample.decode), singly(ids))
    assert text_of(WindowDetokenizer(sample.decode), pieces(ids, cuts)) == whole
    if sample.name == "byte-level":
        assert whole == sample.decode(ids)


def test_without_a_table_a_prompt_may_end_within_a_character() -> None:
    sample = TABLE_SAMPLES[0]
    smile = "🙂".encode()
    for cut in (1, 2, 3):
        assert text_of(WindowDetokenizer(sample.decode, [65, *smile[:cut]]), singly(smile[cut:])) == "🙂"
        assert text_of(WindowDetokenizer(sample.decode, [65, *smile[:cut]]), singly([66])) == "B"
        assert text_of(WindowDetokenizer(sample.decode, [65, *smile[:cut]]), singly([])) == ""


def test_make_detokenizer_uses_a_table_if_there_is_one() -> None:
    sample = TABLE_SAMPLES[0]
    assert isinstance(make_detokenizer(TABLES["byte-level", True]), TableDetokenizer)
    assert isinstance(make_detokenizer(sample.decode), WindowDetokenizer)


def letters(ids: Sequence[int]) -> str:
    """Decode ids below 100 to letters. Other ids have no text."""
    return "".join(chr(97 + token_id % 26) for token_id in ids if token_id < 100)


@pytest.mark.parametrize("ids", [[200] * 999, [1] + [200] * 999, [1, *[200] * 150, 2, *[300] * 999], [1, 200, 2] * 333])
def test_without_a_table_ids_without_text_are_dropped_from_the_window(ids: list[int]) -> None:
    longest = 0

    def decode(window: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(window))
        return letters(window)

    detokenizer = WindowDetokenizer(decode)
    assert text_of(detokenizer, singly(ids)) + detokenizer.push((5,)) == letters([*ids, 5])
    assert longest <= 64
