"""Calls between two steps: the runner has no step in flight, and the requests continue with equal output."""

from __future__ import annotations

import json

import pytest

from aioengine.protocol.messages import Control, FinishCode, Limits, Reply
from aioengine.testing.fake_runner import ECHO
from tests.core.core_world import NO_EOS, World, settings_of, submit_of

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def world_of(depth: int) -> World:
    return World(settings_of(depth=depth, max_running=2, chunk_tokens=8), num_pages=64, page_size=4, model=NO_EOS)


class Echoes:
    """Sends control calls to the runner of a world and keeps the replies."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.num_sent = 0
        self.replies: list[Reply] = []

    def send(self) -> None:
        self.num_sent += 1
        control = Control(self.num_sent, ECHO)
        self._world.core.call_between_steps(lambda: self.replies.append(self._world.runner.controls[ECHO](control)))

    def states(self) -> list[tuple[int, int]]:
        """Return for each reply the number of launched steps, and the number of steps in flight."""
        facts = [json.loads(reply.data) for reply in self.replies]
        return [(fact["num_steps"], fact["num_in_flight"]) for fact in facts]


@DEPTHS
@pytest.mark.parametrize("num_steps", range(7))
def test_a_control_call_runs_when_no_step_is_in_flight(depth: int, num_steps: int) -> None:
    world = world_of(depth)
    echoes = Echoes(world)
    world.submit(submit_of(1, list(range(20))), submit_of(2, [1, 2, 3]), submit_of(3, [4, 5]))
    for _ in range(num_steps):
        world.step()
    echoes.send()
    while not echoes.replies:
        assert world.core.has_work
        assert len(world.runner.plans) == num_steps
        world.step()
    assert echoes.states() == [(num_steps, 0)]
    world.run()
    world.check_all_over()


@DEPTHS
def test_control_calls_between_all_steps_change_no_output(depth: int) -> None:
    world = world_of(depth)
    echoes = Echoes(world)
    world.submit(submit_of(1, list(range(20))), submit_of(2, [1, 2, 3], temperature=1.0), submit_of(3, [4, 5]))
    while not world.scheduler.requests.is_idle:
        if world.runner.plans:
            echoes.send()
            echoes.send()
        world.step()
    world.run()
    assert len(echoes.replies) == echoes.num_sent > 20
    assert {num_in_flight for _, num_in_flight in echoes.states()} == {0}
    assert [reply.call_id for reply in echoes.replies] == list(range(1, echoes.num_sent + 1))
    world.check_all_over()


def test_an_idle_or_paused_core_runs_a_control_call_in_its_next_step() -> None:
    world = world_of(1)
    echoes = Echoes(world)
    echoes.send()
    assert world.core.has_work
    assert world.step() is None
    assert not world.core.has_work
    world.submit(submit_of(1, [1, 2, 3]))
    world.core.is_paused = True
    echoes.send()
    world.step()
    assert echoes.states() == [(0, 0), (0, 0)]
    world.core.is_paused = False
    world.run()
    world.check_all_over()


def test_deadlines_are_kept_while_a_control_call_waits() -> None:
    world = world_of(2)
    world.submit(submit_of(1, [1, 2, 3]), submit_of(2, [1], limits=Limits(max_new_tokens=8, deadlines={"total": 2.5})))
    for _ in range(2):
        world.step()
    world.now = 3.0
    Echoes(world).send()
    world.step()
    assert world.runner.plans[1:] == world.runner.plans[1:2]
    world.run()
    assert world.ended[2].code is FinishCode.DEADLINE
    world.check_all_over()


def test_forget_all_drops_waiting_control_calls() -> None:
    """The ledger sends both again."""
    world = world_of(1)
    echoes = Echoes(world)
    world.submit(submit_of(1, [1, 2, 3]))
    world.step()
    echoes.send()
    world.core.forget_all()
    world.run()
    assert echoes.replies == []
