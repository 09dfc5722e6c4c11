"""A runner that records on a board what it computes."""

from __future__ import annotations

import pytest

from aioengine.processes.scheduler_process import RecordedRunner
from aioengine.protocol.board import CrashBoard, blank_board, read_board
from aioengine.protocol.messages import Control, Reply, Sampling
from aioengine.scheduler.plan import TOKENS, NewRow, Plan, Row
from aioengine.testing.fake_runner import ECHO, FakeModel, FakeRunner
from aioengine.testing.faults import Faults, InjectedFault


def recorded_runner(faults: Faults | None = None) -> tuple[RecordedRunner[object], bytearray]:
    memory = blank_board(2, 4)
    runner = FakeRunner(FakeModel(), num_pages=8, page_size=4, faults=faults)
    return RecordedRunner(runner, CrashBoard(memory)), memory  # type: ignore[arg-type]


OPENED = NewRow(7, Sampling(seed=1), 3, [1, 2, 3], [0])
PROMPT = Plan([Row(7, 0, 3, TOKENS, [1, 2, 3])], [OPENED])
DECODE = Plan([Row(7, 3, 1, TOKENS)])


def test_a_step_is_recorded_from_its_launch_to_its_collection() -> None:
    runner, memory = recorded_runner()
    assert runner.facts["num_pages"] == 8
    first = runner.launch(PROMPT)
    assert read_board(memory) == {7: 3}
    second = runner.launch(DECODE)
    assert read_board(memory) == {7: 4}
    runner.collect(first)
    assert read_board(memory) == {7: 4}
    runner.collect(second)
    assert read_board(memory) == {}
    runner.close()


def test_steps_that_fail_are_not_recorded_any_more() -> None:
    runner, memory = recorded_runner(Faults(raise_at=1, collect_raise_at=2))
    with pytest.raises(InjectedFault):
        runner.launch(PROMPT)
    assert read_board(memory) == {}
    ticket = runner.launch(PROMPT)
    with pytest.raises(InjectedFault):
        runner.collect(ticket)
    assert read_board(memory) == {}


def test_orders_are_passed_to_the_runner() -> None:
    runner, memory = recorded_runner()
    reply = runner.control(Control(3, ECHO, payload=b"ab"))
    assert isinstance(reply, Reply)
    assert (reply.call_id, reply.payload, read_board(memory)) == (3, b"ab", {})
