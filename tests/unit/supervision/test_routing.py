"""The choice of a replica for each request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aioengine.protocol.messages import Adapter, Limits, Sampling, Submit, TextRules
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


def submit_text(uid: int, ids: list[int], *, adapter: int = 0, replica: int | None = None) -> Submit:
    loaded = Adapter(adapter, "a", "/a", "") if adapter else None
    return Submit(uid, ids, Sampling(seed=0), Limits(16), TextRules(), adapter=loaded, replica=replica)


def test_requests_with_the_same_beginning_share_a_replica_until_its_queue_is_longer() -> None:
    routes = Routes(2)
    prefix = list(range(640))
    assert routes.choose(submit_text(0, [*prefix, 1])) == 0
    routes.prompt_computed(0)
    routes.prompt_computed(0)
    assert [routes.choose(submit_text(uid, [*prefix, uid])) for uid in range(1, 30)] == [0] * 29
    assert routes.choose(submit_text(30, [5] * 200)) == 1  # no prefix
    routes.choose(submit_text(31, [6] * 800, replica=0))
    assert routes.choose(submit_text(32, [*prefix, 32])) == 1  # the queue of replica 0 is longer than the prefix
    assert routes.choose(submit_text(33, [*prefix, 33])) == 1  # it has the prefix now, too


def test_prefix_that_no_longer_fits_into_the_cache_is_forgotten() -> None:
    routes = Routes(2, cache_tokens=640)
    prefix = list(range(640))
    routes.choose(submit_text(0, prefix, replica=1))
    routes.forget(0)
    assert routes.choose(submit_text(1, prefix)) == 1
    routes.choose(submit_text(2, [9] * 640, replica=1))
    for uid in (1, 2):
        routes.forget(uid)
    assert routes.choose(submit_text(3, prefix)) == 0


def test_same_prefix_with_another_adapter_does_not_select_a_replica() -> None:
    routes = Routes(3)
    prompt = list(range(320))
    first = routes.choose(submit_text(0, prompt, adapter=1))
    routes.forget(0)
    routes.choose(submit_text(1, [3] * 9))  # a little work for replica 0
    assert first == 0
    assert routes.choose(submit_text(2, prompt, adapter=2)) == 1
    assert routes.choose(submit_text(3, prompt, adapter=1)) == 0
    routes.forget(3)
    assert routes.choose(submit_text(4, [8] * 8, adapter=1)) == 0  # a short prompt, but the adapter is there


def test_round_robin_takes_one_replica_after_the_other() -> None:
    routes = Routes(3, "round_robin")
    assert [routes.choose(submit_of(uid, num_prompt=uid)) for uid in range(5)] == [0, 1, 2, 0, 1]
    routes.remove(1)
    assert {routes.choose(submit_of(uid)) for uid in range(5, 9)} == {0, 2}


def test_shortest_queue_counts_requests() -> None:
    routes = Routes(2, "shortest_queue")
    assert [routes.choose(submit_of(uid, num_prompt=100 - uid)) for uid in range(4)] == [0, 1, 0, 1]
    routes.forget(1)
    assert routes.choose(submit_of(4)) == 1


def test_request_goes_to_the_replica_that_it_names_unless_it_has_failed() -> None:
    routes = Routes(2)
    assert [routes.choose(submit_text(uid, [1], replica=1)) for uid in range(3)] == [1, 1, 1]
    routes.remove(1)
    assert routes.choose(submit_text(3, [1], replica=1)) == 0


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
