"""The pipeline: the pieces of a stream equal the answer, and the ids end where a stop is complete."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.text.detokenizer import TableDetokenizer, TextPipeline, make_detokenizer
from aioengine.text.stop import StopMatcher
from aioengine.text.token_table import TokenTable, read_token_table
from tests.unit.text.sample_tokenizers import TABLE_SAMPLES, Sample


def table_of(sample: Sample) -> TokenTable:
    table = read_token_table(sample.file)
    assert table is not None
    return table


TABLES = {sample.name: table_of(sample) for sample in TABLE_SAMPLES}
BYTES = TABLES["byte-level"]


def pipeline(*stops: str, patterns: tuple[str, ...] = (), no_stop_trim: bool = False) -> TextPipeline:
    return TextPipeline(TableDetokenizer(BYTES, [65]), StopMatcher(stops, patterns, no_stop_trim=no_stop_trim))


def push(stages: TextPipeline, ids: Sequence[int]) -> tuple[str, int, str | None]:
    """Push ids one by one up to a stop. Return the text, the number of pushed ids, and the stop."""
    text, num_pushed = "", 0
    for token_id in ids:
        if stages.matched is not None:
            break
        text += stages.push((token_id,))
        num_pushed += 1
    return text, num_pushed, stages.matched


@pytest.mark.parametrize("sample", TABLE_SAMPLES, ids=lambda sample: sample.name)
@given(data=st.data())
def test_the_joined_pieces_of_a_stream_are_the_answer(sample: Sample, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, sample.num_ids - 1), max_size=16))
    stops = data.draw(st.lists(st.sampled_from(["e", "\ufffd", "th", " ", "▁", "aa", "é"]), max_size=2))
    keeps = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    prompt = sample.encode("a")

    def answer(edges: list[int]) -> tuple[str, list[int], str | None]:
        stages = TextPipeline(make_detokenizer(TABLES[sample.name], prompt), StopMatcher(stops, no_stop_trim=keeps))
        text, output_ids = "", list[int]()
        for start, end in pairwise(edges):
            piece, num_consumed, matched = push(stages, ids[start:end])
            text += piece
            output_ids += ids[start : start + num_consumed]
            if matched is not None:
                assert stages.push(ids[end:]) == ""
                break
        return text + stages.flush(), output_ids, stages.matched

    whole = answer([0, len(ids)])
    assert answer([0, *cuts, len(ids)]) == whole
    assert answer(list(range(len(ids) + 1))) == whole
    text, output_ids, matched = whole
    plain = TextPipeline(make_detokenizer(TABLES[sample.name], prompt))
    full = plain.push(output_ids) + plain.flush()
    if matched is None:
        assert (text, output_ids) == (full, ids)
    else:
        assert full.startswith(text if keeps else text + matched)


def test_ids_end_at_the_token_that_completes_the_stop() -> None:
    assert push(pipeline("bc"), list(b"abcd")) == ("a", 3, "bc")
    assert push(pipeline("bc", no_stop_trim=True), list(b"abcd")) == ("abc", 3, "bc")
    assert push(pipeline(patterns=("[bc]{2}",)), list(b"abcd")) == ("a", 3, "[bc]{2}")


def test_text_may_be_held_back_while_ids_are_not() -> None:
    stages = pipeline("bcd")
    assert push(stages, list(b"ab")) == ("a", 2, None)
    assert push(stages, list(b"c")) == ("", 1, None)
    assert push(stages, []) == ("", 0, None)
    assert stages.flush() == "bc"
    assert stages.matched is None
    assert stages.flush() == ""


def test_without_stops_all_ids_belong_to_the_output() -> None:
    stages = TextPipeline(TableDetokenizer(BYTES))
    assert push(stages, "é".encode()[:1]) == ("", 1, None)
    assert push(stages, "é".encode()[1:]) == ("é", 1, None)
    assert stages.flush() == ""


def test_flush_may_complete_a_stop() -> None:
    stages = pipeline("x\ufffd")
    assert push(stages, [*b"ax", 0xC3]) == ("a", 3, None)
    assert stages.flush() == ""
    assert stages.matched == "x\ufffd"
    assert push(stages, [65]) == ("", 0, "x\ufffd")


def test_stop_may_end_within_a_token() -> None:
    the = next(token_id for token_id in range(256, 300) if BYTES[token_id] == " the")
    stages = pipeline("h")
    assert push(stages, [the, 65]) == (" t", 1, "h")
