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
from aioengine.scheduler.requests import Outbox


def request_of(uid: int) -> Request:
    request = Request(
        Submit(uid, [1, 2], Sampling(seed=0), Limits(max_new_tokens=4), TextRules()), number=1, max_tokens=6
    )
    request.history.admitted_at = 1.0
    return request


def test_events_are_sent_once() -> None:
    outbox = Outbox()
    assert not outbox.has_events
    outbox.open_text(request_of(1), 2.0)
    outbox.end(End(1, FinishCode.STOP, 7))
    assert outbox.has_events
    assert outbox.take(TokenColumns([1], [7])) == StepOutput(
        TokenColumns([1], [7]), [TextOpened(FirstToken(1, 0, 1.0, 2.0), TextRules())], [], [End(1, FinishCode.STOP, 7)]
    )
    assert not outbox.has_events
    assert outbox.take() == StepOutput()


def test_a_preemption_before_the_first_token_is_sent_with_it() -> None:
    outbox, request = Outbox(), request_of(1)
    outbox.preempt(request)
    outbox.preempt(request)
    assert not outbox.has_events
    outbox.open_text(request, 2.0)
    assert outbox.take(TokenColumns([1], [7])).preempted == [1, 1]
    outbox.preempt(request)
    assert outbox.take().preempted == [1]
    assert outbox.totals.num_preemptions == 3


def test_an_end_that_the_frontend_decided_is_counted_and_not_sent() -> None:
    outbox = Outbox()
    outbox.end(End(1, FinishCode.STOP), is_known=True)
    outbox.end(End(2, FinishCode.ABORT))
    outbox.end(End(3, FinishCode.DEADLINE, "queue"))
    outbox.end(End(4, FinishCode.TOO_LARGE, message="large"))
    assert (outbox.totals.num_finished, outbox.totals.num_aborted) == (2, 2)
    assert [ended.uid for ended in outbox.take().ended] == [2, 3, 4]
