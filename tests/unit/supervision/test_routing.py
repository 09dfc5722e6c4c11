"""The choice of a replica for each request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aioengine.protocol.messages import Limits, Sampling, Submit, TextRules
from aioengine.supervision.routing import Routes


def submit_of(uid: int, *, num_prompt: int = 1, max_new_tokens: int = 1) -> Submit:
    return Submit(uid, [1] * num_prompt, Sampling(seed=0), Limits(max_new_tokens), TextRules())


def test_least_loaded_replica_is_chosen_and_keeps_the_request() -> None:
    routes = Routes(3)
    assert [routes.choose(submit_of(uid)) for uid in (1, 2, 3)] == [0, 1, 2]
    assert routes.choose(submit_of(4, num_prompt=9)) == 0
    assert [routes.choose(submit_of(uid)) for uid in (5, 6)] == [1, 2]
    assert routes.choose(submit_of(4)) == 0
    assert [routes.find(uid) for uid in (1, 4, 5, 99)] == [0, 0, 1, None]


def test_ended_request_adds_no_load() -> None:
    routes = Routes(2)
    routes.choose(submit_of(1, max_new_tokens=100))
    routes.choose(submit_of(2, max_new_tokens=50))
    routes.forget(1)
    routes.forget(1)
    assert routes.find(1) is None
    assert routes.choose(submit_of(3)) == 0


def test_removed_replica_gets_no_request() -> None:
    routes = Routes(2)
    assert routes.choose(submit_of(1)) == 0
    routes.remove(0)
    assert list(routes.replicas) == [1]
    assert routes.find(1) is None
    assert [routes.choose(submit_of(uid)) for uid in (1, 2)] == [1, 1]


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60))
def test_each_request_goes_to_a_replica_with_the_fewest_open_requests(actions: list[tuple[int, bool]]) -> None:
    routes = Routes(3)
    placed: dict[int, int] = {}
    for uid, begins in actions:
        if begins:
            counts = [list(placed.values()).count(replica) for replica in range(3)]
            is_new = uid not in placed
            placed.setdefault(uid, routes.choose(submit_of(uid)))
            assert not is_new or counts[placed[uid]] == min(counts)
        else:
            routes.forget(uid)
            placed.pop(uid, None)
    assert {uid: routes.find(uid) for uid in placed} == placed
