"""What a StepOutput tells, and what it counts."""

from __future__ import annotations

from aioengine.protocol.columns import TokenColumns
from aioengine.protocol.messages import Ended, FinishCode, Limits, Opened, Sampling, StepOutput, Submit, TextRules
from aioengine.scheduler.outbox import Outbox
from aioengine.scheduler.request import Request
from aioengine.scheduler.stopping import Finish


def request_of(uid: int) -> Request:
    request = Request(
        Submit(uid, [1, 2], Sampling(seed=0), Limits(max_new_tokens=4), TextRules()), number=1, max_tokens=6
    )
    request.marks.admitted_at = 1.0
    return request


def test_events_are_told_once() -> None:
    outbox = Outbox()
    assert not outbox.has_events
    outbox.open(request_of(1), 2.0)
    outbox.end(1, Finish(FinishCode.STOP, 7))
    assert outbox.has_events
    assert outbox.take(TokenColumns([1], [7])) == StepOutput(
        TokenColumns([1], [7]), [Opened(1, TextRules(), 0, 1.0, 2.0)], [], [Ended(1, FinishCode.STOP, 7)]
    )
    assert not outbox.has_events
    assert outbox.take() == StepOutput()


def test_a_preemption_before_the_first_token_is_told_with_it() -> None:
    outbox, request = Outbox(), request_of(1)
    outbox.preempt(request)
    outbox.preempt(request)
    assert not outbox.has_events
    outbox.open(request, 2.0)
    assert outbox.take(TokenColumns([1], [7])).preempted == [1, 1]
    outbox.preempt(request)
    assert outbox.take().preempted == [1]
    assert outbox.totals.num_preemptions == 3


def test_what_ends_silently_is_counted_and_not_told() -> None:
    outbox = Outbox()
    outbox.end(1, Finish(FinishCode.STOP), silently=True)
    outbox.end(2, Finish(FinishCode.ABORT))
    outbox.end(3, Finish(FinishCode.DEADLINE, "queue"))
    outbox.end(4, Finish(FinishCode.TOO_LARGE, message="large"))
    assert (outbox.totals.num_finished, outbox.totals.num_aborted) == (2, 2)
    assert [ended.uid for ended in outbox.take().ended] == [2, 3, 4]
