"""The order in which policies admit the waiting requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine import plugins
from aioengine.protocol.messages import Limits, Sampling, Submit, TextRules
from aioengine.scheduler.policies._base import WINDOW, Policy
from aioengine.scheduler.request import Request


def request_of(uid: int, arrived_at: float, *, priority: int = 0, **deadlines: float) -> Request:
    limits = Limits(max_new_tokens=4, deadlines=deadlines)
    submit = Submit(uid, [1], Sampling(seed=0), limits, TextRules(), priority, arrived_at)
    return Request(submit, number=uid, max_tokens=5)


def asked(name: str, requests: list[Request], num_cached: Callable[[Request], int] = lambda _: 0) -> list[int]:
    policy: Policy = plugins.load("scheduler/policies", name)()
    waiting = sorted(requests, key=lambda request: (*policy.key(request), request.uid))
    return [request.uid for request in policy.candidates(waiting, num_cached)]


@pytest.mark.parametrize("name", plugins.names("scheduler/policies"))
def test_equal_requests_are_ordered_by_arrival(name: str) -> None:
    assert asked(name, [request_of(uid, 0.1 * uid) for uid in (3, 1, 2)]) == [1, 2, 3]


@pytest.mark.parametrize("name", plugins.names("scheduler/policies"))
def test_higher_priority_comes_first(name: str) -> None:
    requests = [request_of(1, 0.0), request_of(2, 1.0, priority=-1), request_of(3, 2.0, priority=5)]
    assert asked(name, requests) == [3, 1, 2]


@pytest.mark.parametrize("name", plugins.names("scheduler/policies"))
def test_a_request_that_waited_long_enough_is_not_overtaken(name: str) -> None:
    requests = [request_of(1, 0.0, priority=-1), *(request_of(uid, 2000.0, priority=1) for uid in range(2, 80))]
    assert asked(name, requests, lambda request: request.uid)[0] == 1


@pytest.mark.parametrize("name", plugins.names("scheduler/policies"))
def test_the_nearest_deadline_comes_first_among_requests_of_equal_priority(name: str) -> None:
    requests = [request_of(1, 0.0), request_of(2, 0.1, total=50.0), request_of(3, 0.2, total=40.0)]
    requests += [request_of(4, 0.3, total=1.0, priority=-1), request_of(5, 12.0, total=13.0)]
    assert asked(name, requests) in ([3, 2, 1, 4, 5], [3, 2, 1, 5, 4])


@pytest.mark.parametrize("kind", ["total", "queue", "first_token"])
def test_the_nearest_deadline_is_the_first_of_all_deadlines_of_a_request(kind: str) -> None:
    late = request_of(1, 0.0, **{"total": 99.0, kind: 7.0})
    assert asked("fcfs", [request_of(2, 0.0, total=7.5), late, request_of(3, 0.0, total=6.5)]) == [3, 1, 2]


def test_longest_prefix_puts_the_most_cached_first_within_its_window() -> None:
    requests = [request_of(uid, uid / 10) for uid in range(1, WINDOW + 3)]
    order = asked("longest_prefix", requests, lambda request: request.uid if request.uid % 2 else 0)
    assert order[:2] == [WINDOW - 1, WINDOW - 3]
    assert order[-2:] == [WINDOW + 1, WINDOW + 2]
    assert sorted(order) == [request.uid for request in requests]


def test_longest_prefix_reorders_only_requests_that_arrived_close_together() -> None:
    requests = [request_of(1, 0.0), request_of(2, 9.0), request_of(3, 11.0), request_of(4, 12.0)]
    assert asked("longest_prefix", requests, lambda request: request.uid) == [2, 1, 4, 3]


@given(st.lists(st.tuples(st.floats(0, 1e5), st.integers(-3, 3)), min_size=2, max_size=20))
def test_every_policy_returns_each_request_once(arrivals: list[tuple[float, int]]) -> None:
    requests = [request_of(uid, at, priority=priority) for uid, (at, priority) in enumerate(arrivals)]
    for name in plugins.names("scheduler/policies"):
        assert sorted(asked(name, requests)) == list(range(len(requests)))
