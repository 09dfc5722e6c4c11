"""Each tenant gets the share of its weight, independent of its requests."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.protocol.messages import Limits, Sampling, Submit, TextRules
from aioengine.scheduler.request import Request
from aioengine.scheduler.tenants import MAX_AWAY, Tenants


def request_of(uid: int, tenant: str, num_tokens: int) -> Request:
    submit = Submit(uid, [1], Sampling(seed=0), Limits(max_new_tokens=num_tokens), TextRules(), tenant=tenant)
    return Request(submit, number=uid, max_tokens=num_tokens)


def shares(tenants: Tenants, sizes: dict[str, list[int]], num_admitted: int) -> dict[str, int]:
    """Return the tokens of each tenant after ``num_admitted`` admissions. The sizes of a tenant repeat."""
    requests = [
        request_of(uid, tenant, line[uid % len(line)]) for tenant, line in sizes.items() for uid in range(num_admitted)
    ]
    for request in requests:
        tenants.enter(request.submit.tenant)
    given_to = dict.fromkeys(sizes, 0)
    for _, request in zip(range(num_admitted), tenants.in_turn(requests), strict=False):
        tenants.charge(request.submit.tenant, request.max_tokens)
        given_to[request.submit.tenant] += request.max_tokens
    return given_to


SIZES = st.lists(st.integers(1, 500), min_size=1, max_size=5)


@given(
    st.dictionaries(st.sampled_from("abcd"), SIZES, min_size=2), st.lists(st.floats(0.1, 10), min_size=4, max_size=4)
)
def test_shares_differ_by_at_most_one_request_of_each_tenant(sizes: dict[str, list[int]], weights: list[float]) -> None:
    weight_of = dict(zip("abcd", weights, strict=True))
    given_to = shares(Tenants(weight_of), sizes, 60)
    for size in sizes:
        for other in sizes:
            most = max(sizes[size]) / weight_of[size] + max(sizes[other]) / weight_of[other]
            assert abs(given_to[size] / weight_of[size] - given_to[other] / weight_of[other]) <= most + 1e-6


def test_many_requests_of_one_tenant_do_not_delay_another() -> None:
    tenants = Tenants({})
    flood = [request_of(uid, "loud", 100) for uid in range(1000)]
    for _ in flood:
        tenants.enter("loud")
    for request in flood[:50]:
        tenants.charge("loud", request.max_tokens)
    tenants.enter("quiet")
    turns = tenants.in_turn([*flood[50:], request_of(1000, "quiet", 100)])
    assert next(turns).uid == 50  # as much as the other, and older
    tenants.charge("loud", 100)
    assert next(turns).uid == 1000


def test_idle_tenants_save_no_credit_and_keep_their_debt_while_others_wait() -> None:
    tenants = Tenants({})
    tenants.enter("steady")
    tenants.enter("greedy")
    tenants.charge("steady", 100)
    tenants.charge("greedy", 300)
    tenants.leave("greedy")
    tenants.enter("rested")
    tenants.enter("greedy")
    line = [request_of(1, "greedy", 50), request_of(2, "rested", 50), request_of(3, "steady", 50)]
    taken = deque[str]()
    for request in tenants.in_turn(line * 4):
        tenants.charge(request.submit.tenant, 50)
        taken.append(request.submit.tenant)
    assert list(taken)[:8] == ["rested", "steady"] * 4


def test_unused_tokens_are_credited() -> None:
    tenants = Tenants({})
    for tenant in "ab":
        tenants.enter(tenant)
    tenants.charge("a", 1000)
    tenants.charge("a", -990)
    tenants.charge("b", 20)
    assert next(tenants.in_turn([request_of(1, "b", 1), request_of(2, "a", 1)])).uid == 2


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 100)), max_size=60))
def test_tenants_without_requests_and_debt_are_forgotten(visits: list[tuple[str, int]]) -> None:
    tenants = Tenants({})
    tenants.enter("stays")
    for tenant, num_tokens in visits:
        tenants.enter(tenant)
        tenants.charge(tenant, num_tokens)
        tenants.leave(tenant)
    tenants.charge("stays", 10_000)
    tenants.enter("x")
    tenants.leave("x")
    assert len(tenants._times) == 1
    tenants.leave("stays")
    assert len(tenants._times) == 0


@pytest.mark.parametrize("tenant", ["", "a"])
def test_a_single_tenant_keeps_the_order(tenant: str) -> None:
    tenants = Tenants({})
    requests = [request_of(uid, tenant, 10) for uid in (3, 1, 2)]
    for _ in requests:
        tenants.enter(tenant)
    assert [request.uid for request in tenants.in_turn(requests)] == [3, 1, 2]


def test_inactive_tenants_with_the_largest_times_are_kept() -> None:
    tenants = Tenants({})
    tenants.enter("stays")
    for number in range(3 * MAX_AWAY):
        tenants.enter(f"passes {number}")
        tenants.charge(f"passes {number}", 1 + number)
        tenants.leave(f"passes {number}")
    assert len(tenants._times) == MAX_AWAY + 1
    for number in (0, 3 * MAX_AWAY - 1):
        tenants.enter(f"passes {number}")
    requests = [request_of(number, f"passes {number}", 1) for number in (3 * MAX_AWAY - 1, 0)]
    assert [request.uid for request in tenants.in_turn(requests)] == [0, 3 * MAX_AWAY - 1]
    tenants.leave("stays")
    for number in (0, 3 * MAX_AWAY - 1):
        tenants.leave(f"passes {number}")
    assert len(tenants._times) == 0
