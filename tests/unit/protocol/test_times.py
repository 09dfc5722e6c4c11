"""Times in frames between machines are converted to the clock of the receiver."""

from __future__ import annotations

from aioengine.protocol.codec import FrameDecoder, FrameEncoder
from aioengine.protocol.messages import (
    Continuation,
    End,
    FinishCode,
    FirstToken,
    Limits,
    Message,
    Sampling,
    Stats,
    Submit,
    TextChunks,
    TextRules,
)

EPOCH = 5
SENT_AT, RECEIVED_AT = 100.0, 7000.0
LATER = RECEIVED_AT - SENT_AT


def submit(later: float = 0.0) -> Submit:
    return Submit(
        1,
        [5],
        Sampling(seed=1),
        Limits(7, deadlines={"total": 130.0 + later, "queue": 101.0 + later}),
        TextRules(),
        arrived_at=99.5 + later,
        continuation=Continuation(FirstToken(1, 0, 90.0 + later, 91.0 + later), [7]),
    )


def chunks(later: float = 0.0) -> TextChunks:
    ends = [
        End(1, FinishCode.STOP, admitted_at=90.0 + later, first_token_at=91.0 + later, ended_at=99.0 + later),
        End(2, FinishCode.ABORT, ended_at=98.0 + later),
    ]
    return TextChunks(ended=ends, first_tokens=[FirstToken(1, 0, 90.0 + later, 91.0 + later)])


def received(messages: list[Message], *, is_remote: bool) -> list[Message]:
    encoder = FrameEncoder(EPOCH, clock=(lambda: SENT_AT) if is_remote else None)
    return FrameDecoder(EPOCH, lambda: RECEIVED_AT).decode(encoder.encode(messages))


def test_times_keep_their_distance_to_the_moment_of_sending() -> None:
    sent = submit(), chunks(), Stats(sent_at=100.0, step_ended_at=99.0), Stats(sent_at=100.0)
    assert received([*sent], is_remote=True) == [
        submit(LATER),
        chunks(LATER),
        Stats(sent_at=100.0 + LATER, step_ended_at=99.0 + LATER),
        Stats(sent_at=100.0 + LATER),
    ]
    assert sent[:2] == (submit(), chunks())


def test_times_are_not_changed_on_one_machine() -> None:
    assert received([submit(), chunks()], is_remote=False) == [submit(), chunks()]
