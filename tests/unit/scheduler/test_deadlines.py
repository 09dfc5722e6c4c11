"""Requests whose deadline has passed."""

from __future__ import annotations

from aioengine.protocol.messages import Limits, Sampling, Submit, TextRules
from aioengine.scheduler.deadlines import SPARE_ENTRIES, Deadlines
from aioengine.scheduler.request import Request


def add(deadlines: Deadlines, requests: dict[int, Request], uid: int, **times: float) -> Request:
    limits = Limits(max_new_tokens=4, deadlines=times)
    requests[uid] = Request(Submit(uid, [1], Sampling(seed=0), limits, TextRules()), number=uid, max_tokens=5)
    deadlines.add(uid, times, requests)
    return requests[uid]


def expired(deadlines: Deadlines, requests: dict[int, Request], now: float) -> list[tuple[int, str]]:
    return [(request.uid, kind) for request, kind in deadlines.take_expired(now, requests)]


def test_each_request_expires_once_by_its_first_deadline() -> None:
    deadlines, requests = Deadlines(), dict[int, Request]()
    add(deadlines, requests, 1, total=5.0, queue=3.0, first_token=4.0)
    add(deadlines, requests, 2, total=3.5)
    add(deadlines, requests, 3)
    assert deadlines.next_time(requests) == 3.0
    assert expired(deadlines, requests, 2.9) == []
    assert expired(deadlines, requests, 4.5) == [(1, "queue"), (2, "total")]


def test_queue_and_first_token_deadlines_end_with_admission_and_first_token() -> None:
    deadlines, requests = Deadlines(), dict[int, Request]()
    request = add(deadlines, requests, 1, total=9.0, queue=3.0, first_token=4.0)
    request.admitted_at = 1.0
    assert deadlines.next_time(requests) == 4.0
    assert expired(deadlines, requests, 3.0) == []
    request.is_text_open = True
    assert deadlines.next_time(requests) == 9.0
    assert expired(deadlines, requests, 9.0) == [(1, "total")]
    assert deadlines.next_time(requests) is None


def test_ended_requests_are_forgotten() -> None:
    deadlines, requests = Deadlines(), dict[int, Request]()
    add(deadlines, requests, 1, total=9.0)
    del requests[1]
    assert deadlines.next_time(requests) is None
    for uid in range(2 * SPARE_ENTRIES):
        add(deadlines, requests, uid, total=9.0 + uid)
    living = {7: requests[7]}
    add(deadlines, living, 1000, total=9.0)
    assert len(deadlines.heap) == 2
    assert expired(deadlines, living, 1e9) == [(1000, "total"), (7, "total")]
