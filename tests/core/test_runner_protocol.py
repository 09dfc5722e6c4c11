"""SchedulerCore with runners that implement only the Runner protocol, and with the crash board."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from aioengine.protocol.board import CrashBoard, blank_board, read_board
from aioengine.protocol.messages import Control, Reply
from aioengine.scheduler.core import SchedulerCore
from aioengine.testing.fake_runner import ECHO, FakeRunner, FakeTicket
from aioengine.testing.faults import Faults, InjectedFault
from tests.core.core_world import NO_EOS, World, settings_of, submit_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aioengine.scheduler.plan import StepPlan, StepResult
    from aioengine.scheduler.runner import Runner


class FanOutRunner:
    """Computes each plan on several ranks, as tensor parallelism does, and returns the result of the first rank."""

    def __init__(self, ranks: list[FakeRunner]) -> None:
        self._ranks = ranks
        self.facts = ranks[0].facts
        self.adapters = None
        self.use_grammars = None
        self.use_ranks = None

    @property
    def controls(self) -> Mapping[str, Callable[[Control], Reply]]:
        return dict.fromkeys(self._ranks[0].controls, self._control)

    def launch(self, plan: StepPlan) -> list[FakeTicket]:
        return [rank.launch(plan) for rank in self._ranks]

    def collect(self, ticket: list[FakeTicket]) -> StepResult:
        results = [rank.collect(part) for rank, part in zip(self._ranks, ticket, strict=True)]
        assert all(result.tokens.rows() == results[0].tokens.rows() for result in results)
        return results[0]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()

    def _control(self, message: Control) -> Reply:
        replies = [rank.controls[message.name](message) for rank in self._ranks]
        return replies[0]


def fake_runner(faults: Faults | None = None) -> FakeRunner:
    return FakeRunner(NO_EOS, num_pages=64, page_size=4, faults=faults)


def world_with(runner: Runner[list[FakeTicket]] | FakeRunner, board: CrashBoard | None = None, *, depth: int) -> World:
    world = World(settings_of(depth=depth, max_running=2, chunk_tokens=8), num_pages=64, page_size=4, model=NO_EOS)
    world.core = SchedulerCore(world.scheduler, runner, depth, board=board)
    return world


def test_runner_that_fans_out_to_ranks_gives_the_same_tokens() -> None:
    runner = FanOutRunner([fake_runner() for _ in range(3)])
    world = world_with(runner, depth=1)
    world.submit(submit_of(1, list(range(20))), submit_of(2, [1, 2, 3], temperature=1.0))
    world.run()
    world.check_all_over()
    reply = runner.controls[ECHO](Control(3, ECHO, {"rank": 8}))
    assert (reply.call_id, json.loads(reply.data)["arguments"]) == (3, {"rank": 8})


def test_steps_are_on_the_board_from_launch_to_collection() -> None:
    memory = blank_board(2, 4)
    world = world_with(fake_runner(), CrashBoard(memory), depth=1)
    world.submit(submit_of(7, [1, 2, 3]))
    world.step()
    assert read_board(memory) == {7: 3}
    world.step()
    assert read_board(memory) == {7: 4}
    world.run()
    assert read_board(memory) == {}


@pytest.mark.parametrize("faults", [Faults(raise_at=1, raise_times=3), Faults(collect_raise_at=1, raise_times=3)])
def test_failed_steps_do_not_stay_on_the_board(faults: Faults) -> None:
    memory = blank_board(2, 4)
    world = world_with(fake_runner(faults), CrashBoard(memory), depth=0)
    for uid in (1, 2):
        world.submit(submit_of(uid, [1, 2, 3]))
        world.step()
        assert read_board(memory) == {}
    world.submit(submit_of(3, [1, 2, 3]))
    with pytest.raises(InjectedFault):
        world.step()
    assert read_board(memory) == {}
