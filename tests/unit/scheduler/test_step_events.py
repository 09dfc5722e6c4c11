"""The events of a StepOutput, and the totals."""

from __future__ import annotations

from aioengine.protocol.columns import TokenColumns
from aioengine.protocol.messages import (
    End,
    FinishCode,
    FirstToken,
    Limits,
    Sampling,
    StepOutput,
    Submit,
    TextOpened,
    TextRules,
)
from aioengine.scheduler.request import Request
from aioengine.scheduler.request_states import StepEvents


def request_of(uid: int) -> Request:
    request = Request(
        Submit(uid, [1, 2], Sampling(seed=0), Limits(max_new_tokens=4), TextRules()), number=1, max_tokens=6
    )
    request.admitted_at = 1.0
    return request


def test_events_are_sent_once() -> None:
    events = StepEvents()
    assert not events.has_events
    events.open_text(request_of(1), 2.0)
    events.end(End(1, FinishCode.STOP, 7))
    assert events.has_events
    assert events.take(TokenColumns([1], [7])) == StepOutput(
        TokenColumns([1], [7]), [TextOpened(FirstToken(1, 0, 1.0, 2.0), TextRules())], [], [End(1, FinishCode.STOP, 7)]
    )
    assert not events.has_events
    assert events.take() == StepOutput()


def test_a_preemption_before_the_first_token_is_sent_with_it() -> None:
    events, request = StepEvents(), request_of(1)
    events.preempt(request)
    events.preempt(request)
    assert not events.has_events
    events.open_text(request, 2.0)
    assert events.take(TokenColumns([1], [7])).preempted == [1, 1]
    events.preempt(request)
    assert events.take().preempted == [1]
    assert events.totals.num_preemptions == 3


def test_an_end_that_the_frontend_decided_is_counted_and_not_sent() -> None:
    events = StepEvents()
    events.end(End(1, FinishCode.STOP), is_known=True)
    events.end(End(2, FinishCode.ABORT))
    events.end(End(3, FinishCode.DEADLINE, "queue"))
    events.end(End(4, FinishCode.TOO_LARGE, message="large"))
    assert (events.totals.num_finished, events.totals.num_aborted) == (2, 2)
    assert [ended.uid for ended in events.take().ended] == [2, 3, 4]
