"""A new core continues after a crash with the same tokens and ends."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.protocol.messages import Continuation, End, FinishCode, FirstToken, Limits, Submit, TextOpened
from tests.core.core_world import World, small_world, submit_of
from tests.core.test_storms import Storm, storms


def resumed(world: World, uid: int, num_given: int) -> Submit:
    """Return the request after this number of its tokens was delivered. With none it is a new request."""
    submit, opened = world.submitted[uid], world.opened.get(uid)
    if opened is None:
        return submit
    begun = opened.first_token
    return msgspec.structs.replace(submit, continuation=Continuation(begun, world.outputs[uid][:num_given]))


@given(storms, st.integers(0, 60), st.integers(0, 2))
def test_a_request_continued_after_any_number_of_tokens_gives_the_reference_tokens(
    storm: Storm, num_steps: int, depth: int
) -> None:
    rng = random.Random(storm.seed)
    first = storm.world(depth)
    first.submit(*storm.requests(rng))
    for _ in range(num_steps):
        first.step()
    second = storm.world(depth)
    again = [resumed(first, uid, rng.randint(0, len(given))) for uid, given in first.outputs.items()]
    second.submit(*(submit for submit in again if submit.uid not in first.ended))
    second.run()
    second.check_all_over()
    for uid, ended in first.ended.items():
        if ended.code in (FinishCode.STOP, FinishCode.LENGTH):
            assert first.outputs[uid] == first.reference(uid)


@given(storms, st.integers(0, 60), st.integers(0, 2))
def test_requests_can_be_submitted_again_after_forget_all(storm: Storm, num_steps: int, depth: int) -> None:
    """Steps in flight have rows with the uids of requests that are submitted again."""
    rng = random.Random(storm.seed)
    world = storm.world(depth)
    world.submit(*storm.requests(rng))
    for _ in range(num_steps):
        world.step()
    again = [resumed(world, uid, rng.randint(0, len(given))) for uid, given in world.outputs.items()]
    world.forget_all()
    stats = world.core.scheduler.stats(world.now)
    assert (stats.num_running, stats.num_waiting, stats.num_free_pages) == (0, 0, stats.num_pages)
    world.submit(*(submit for submit in again if submit.uid not in world.ended))
    world.run()
    world.check_all_over()


def test_forget_all_keeps_the_prefix_cache() -> None:
    world = small_world()
    world.submit(submit_of(1, list(range(40))))
    for _ in range(3):
        world.step()
    world.forget_all()
    assert not world.core.has_work
    world.submit(submit_of(1, list(range(40))))
    world.run()
    assert world.opened[1].first_token.num_cached >= 36
    world.check_all_over()


def test_forget_all_drops_deadlines() -> None:
    world = small_world()
    world.submit(submit_of(1, [1, 2], limits=Limits(max_new_tokens=4, deadlines={"total": 30.0})))
    world.forget_all()
    assert world.core.requests.next_deadline() is None
    world.submit(submit_of(1, [1, 2], limits=Limits(max_new_tokens=4)))
    assert world.core.requests.next_deadline() is None


@pytest.mark.parametrize("num_given", [0, 3])
def test_continued_request_keeps_its_times_and_counts_once(num_given: int) -> None:
    world = small_world()
    given = world_output(num_given)
    begun = FirstToken(1, 2, 1.0, 2.0)
    submit = msgspec.structs.replace(submit_of(1, [1, 2, 3]), continuation=Continuation(begun, given, 4))
    world.now = 50.0
    world.submit(submit)
    output = world.step()
    assert output is not None
    assert output.opened == [TextOpened(FirstToken(1, 2, 1.0, 2.0), submit.text, given, 4)]
    world.run()
    assert world.ended[1].code is FinishCode.LENGTH
    assert world.outputs[1] == world.reference(1)
    stats = world.core.scheduler.stats(60.0)
    assert (stats.prompt_tokens, stats.output_tokens) == (0, 8 - num_given)


def test_continued_request_can_be_aborted_before_its_first_step() -> None:
    """Its text may be held back, and only a new detokenizer can return this text."""
    world = small_world()
    world.submit(
        msgspec.structs.replace(submit_of(1, [1, 2, 3]), continuation=Continuation(FirstToken(1, 0, 1.0, 2.0), [5]))
    )
    world.abort([1])
    output = world.step()
    assert output is not None
    assert ([request.first_token.uid for request in output.opened], output.ended) == ([1], [End(1, FinishCode.ABORT)])
    assert world.runner.plans == []


def test_a_continued_request_has_no_queue_or_first_token_deadline() -> None:
    limits = Limits(max_new_tokens=4, deadlines={"queue": 9.0, "first_token": 10.0})
    world = small_world()
    world.now = 50.0
    begun = Continuation(FirstToken(1, 0, 1.0, 2.0), [])
    world.submit(msgspec.structs.replace(submit_of(1, [1, 2, 3], limits=limits), continuation=begun))
    world.submit(submit_of(2, [1, 2, 3], limits=limits))
    world.run()
    assert world.ended[1].code is FinishCode.LENGTH
    assert (world.ended[2].code, world.ended[2].matched) == (FinishCode.DEADLINE, "queue")


def world_output(count: int) -> list[int]:
    """Return the first tokens of that request."""
    world = small_world()
    world.submit(submit_of(1, [1, 2, 3]))
    return world.reference(1)[:count]
