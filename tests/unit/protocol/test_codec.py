"""Decoded frames equal the encoded ones. All other bytes raise BadFrameError."""

from __future__ import annotations

import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.protocol import codec
from aioengine.protocol.codec import (
    BadFrameError,
    FrameDecoder,
    FrameEncoder,
    FrameTooLargeError,
    LostFrameError,
    fingerprint,
)
from aioengine.protocol.columns import NO_TOKEN, Extra, TokenColumns
from aioengine.protocol.messages import (
    SCHEDULER,
    Abort,
    Continuation,
    Control,
    End,
    Failed,
    FinishCode,
    FirstToken,
    Limits,
    LogRecord,
    Message,
    NewEpoch,
    Progress,
    Ready,
    Reply,
    RequestKind,
    Resume,
    Role,
    Sampling,
    Stats,
    StepOutput,
    Submit,
    Suspend,
    TextChunks,
    TextOpened,
    TextRules,
)
from aioengine.protocol.rank_step import RankAdapter, RankStep

EPOCH = 2**62 + 11

MESSAGES: list[Message] = [
    RankStep(1, b"plan"),
    RankAdapter(2, 5, [3, 4], b"adapter"),
    Submit(1, [5, 6], Sampling(seed=2**63), Limits(7, stop_token_ids=(1,)), TextRules(stop=("\n",)), arrived_at=1.5),
    Submit(
        2, [5], Sampling(seed=1), Limits(7), TextRules(), continuation=Continuation(FirstToken(2, 0, 1.0, 2.0), [7])
    ),
    Submit(3, [5], Sampling(seed=1), Limits(0), TextRules(), kind=RequestKind.POOL),
    Abort([1, 2], FinishCode.STOP, "why"),
    Suspend([1, 2]),
    Resume([1, 2]),
    Control(3, "flush_cache", {"a": None, "b": 1.5, "c": "d", "e": True, "f": ["g", "h"]}),
    StepOutput(TokenColumns([1], [2]), ended=[End(1, FinishCode.LENGTH)]),
    StepOutput(
        TokenColumns([1, 3], [2, 2], [2, 0], [Extra(3, NO_TOKEN, "kind", b"\x00\xff")]),
        [TextOpened(FirstToken(1, 3, 1.0, 2.0), TextRules())],
        [4],
        [End(1, FinishCode.LENGTH)],
    ),
    TextChunks(TokenColumns([1], [2]), ["é\U0001f600"], [End(1, FinishCode.STOP, "x", ended_at=3.0)], 4),
    Stats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10.0, 11.0, 12, 13, 14, 15, 16),
    Reply(3, True, "", "{}"),
    Ready(SCHEDULER, 12, "ab"),
    Failed(Role("scheduler", 1), "ValueError", "no"),
    Progress("weights", 1, 2),
    LogRecord("aioengine.x", 40, "hello"),
    NewEpoch(2**61),
]


def test_messages_are_decoded_equal_and_in_order() -> None:
    encoder, decoder = FrameEncoder(EPOCH), FrameDecoder(EPOCH, time.monotonic)
    assert decoder.decode(encoder.encode(MESSAGES)) == MESSAGES
    assert decoder.decode(encoder.encode([])) == []
    for message in MESSAGES:
        assert decoder.decode(encoder.encode([message])) == [message]
    assert len({type(message) for message in MESSAGES}) == 16


def test_a_frame_of_another_epoch_is_dropped() -> None:
    decoder = FrameDecoder(EPOCH, time.monotonic)
    assert decoder.decode(FrameEncoder(EPOCH - 1).encode(MESSAGES)) == []


@pytest.mark.parametrize("wrong", [0, 2, 3])
def test_a_frame_with_an_unexpected_number_means_that_one_is_lost(wrong: int) -> None:
    encoder, other = FrameEncoder(EPOCH), FrameEncoder(EPOCH)
    frames = [bytes(encoder.encode([Abort([number])])) for number in range(4)]
    decoder = FrameDecoder(EPOCH, time.monotonic)
    assert decoder.decode(frames[0]) == [Abort([0])]
    assert decoder.decode(other.encode([Abort([9])])) == [Abort([9])]
    with pytest.raises(LostFrameError, match=f"frame 1 of a sender is missing, but frame {wrong} has arrived"):
        decoder.decode(frames[wrong])


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_damaged_frame_is_reported_missing_by_the_next_one(lost: int) -> None:
    encoder = FrameEncoder(EPOCH)
    frames = [bytes(encoder.encode([Abort([number])])) for number in range(5)]
    decoder = FrameDecoder(EPOCH, time.monotonic)
    for frame in frames[:lost]:
        decoder.decode(frame)
    with pytest.raises(BadFrameError):
        decoder.decode(frames[lost][:-1])
    with pytest.raises(LostFrameError, match=f"frame {lost} of a sender is missing"):
        decoder.decode(frames[lost + 1])


def test_frames_of_an_earlier_epoch_are_not_reported_missing() -> None:
    encoder, decoder = FrameEncoder(EPOCH), FrameDecoder(EPOCH, time.monotonic)
    encoder.encode([])
    encoder.begin(EPOCH + 1)
    decoder.begin(EPOCH + 1)
    assert decoder.decode(encoder.encode([Abort([1])])) == [Abort([1])]
    assert decoder.decode(FrameEncoder(EPOCH).encode([Abort([1])])) == []


def test_a_frame_that_is_too_large_uses_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 100)
    encoder, decoder = FrameEncoder(EPOCH), FrameDecoder(EPOCH, time.monotonic)
    with pytest.raises(FrameTooLargeError):
        encoder.encode([Abort(list(range(1000)))])
    assert decoder.decode(encoder.encode([Abort([1])])) == [Abort([1])]


def test_a_frame_of_several_messages_may_have_a_lower_limit() -> None:
    encoder, decoder = FrameEncoder(EPOCH, max_bytes_of_several=100), FrameDecoder(EPOCH, time.monotonic)
    large = Reply(1, True, "x" * 200)
    with pytest.raises(FrameTooLargeError, match="the limit is 100"):
        encoder.encode([large, large])
    assert decoder.decode(encoder.encode([large])) == [large]


@pytest.mark.parametrize(
    "message",
    [
        ["step_output", [[1], [3], None, [[1, -2, "kind", b"data"]]]],
        ["step_output", [[1], [3], None, [[1, 0, "kind"]]]],
    ],
)
def test_messages_with_invalid_extras_are_refused(message: list[object]) -> None:
    frame = msgspec.msgpack.encode([EPOCH, 1, 0, [message]])
    with pytest.raises(BadFrameError, match="Extra|Expected `(int|array)`"):
        FrameDecoder(EPOCH, time.monotonic).decode(frame)


def test_sizes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = bytes(FrameEncoder(EPOCH).encode(MESSAGES))
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 100)
    message = rf"{len(MESSAGES)} messages take {len(frame)} bytes, the limit is 100"
    with pytest.raises(FrameTooLargeError, match=message):
        FrameEncoder(EPOCH).encode(MESSAGES)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated"),
        (b"\x94\x05", "truncated"),
        (b"\x91" * 100_000, "array"),
        (b"\x94\xa15\x01\x00\x90", "Expected `int`"),
        (msgspec.msgpack.encode([EPOCH, 1, 0, [["unheard_of", 1]]]), "unheard_of"),
        (msgspec.msgpack.encode([EPOCH, 1, 0, [["abort", [1], 99]]]), "Invalid enum value 99"),
        (msgspec.msgpack.encode([EPOCH, 1, 0, [["abort", ["1"]]]]), "Expected `int`"),
        (b"GET / HTTP/1.1\r\n", r"Expected `array`, got `int`.*47 45 54 20"),
    ],
)
def test_bytes_that_are_not_a_frame_raise_bad_frame_error(data: bytes, reason: str) -> None:
    with pytest.raises(BadFrameError, match=reason):
        FrameDecoder(EPOCH, time.monotonic).decode(data)


def assert_decoded_or_refused(decoder: FrameDecoder, frame: bytes) -> None:
    error: BadFrameError | LostFrameError | None = None
    messages: list[Message] = []
    try:
        messages = decoder.decode(frame)
    except (BadFrameError, LostFrameError) as refused:
        error = refused
    assert all(isinstance(message, msgspec.Struct) for message in messages)
    if isinstance(error, BadFrameError):
        assert f"{len(frame)} bytes, beginning with {frame[:24].hex(' ')}" in str(error)


@given(st.binary(max_size=200))
def test_random_bytes_are_decoded_or_refused(data: bytes) -> None:
    decoder = FrameDecoder(EPOCH, time.monotonic)
    assert_decoded_or_refused(decoder, data)


@given(st.data())
def test_a_damaged_frame_is_decoded_or_refused(data: st.DataObject) -> None:
    frame = bytearray(FrameEncoder(EPOCH).encode(MESSAGES))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    del frame[data.draw(st.integers(len(frame) - 3, len(frame))) :]
    assert_decoded_or_refused(FrameDecoder(EPOCH, time.monotonic), bytes(frame))


def test_the_fingerprint_contains_each_field_of_each_struct() -> None:
    lines: dict[str, str] = {}
    codec._describe(codec.Frame, lines)
    names = {type(message).__name__ for message in MESSAGES} | {"Frame", "Sampling", "Limits", "TextRules"}
    assert set(lines) == names | {
        "Adapter", "Continuation", "End", "Extra", "FinishCode", "FirstToken", "Grammar", "LogprobRules", "Media",
        "RequestKind", "Role", "TextOpened", "TokenColumns",
    }  # fmt: skip
    assert "deadlines:dict[str, float]:False" in lines["Limits"]
    assert "('DEADLINE', 3)" in lines["FinishCode"]
    assert len(fingerprint()) == 32
