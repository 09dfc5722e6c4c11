"""The board lists the rows in flight, also after its process was killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioengine.protocol.board import CrashBoard, blank_board, read_board

rows = st.dictionaries(st.integers(0, 2**40), st.integers(0, 2**20), max_size=8)


@given(st.integers(1, 3), st.lists(rows, max_size=12), st.data())
def test_the_board_lists_the_requests_of_steps_in_flight(
    num_steps: int, steps: list[dict[int, int]], data: st.DataObject
) -> None:
    memory = blank_board(num_steps, 8)
    board = CrashBoard(memory)
    flying: list[dict[int, int]] = []
    for step in steps:
        if len(flying) == num_steps or (flying and data.draw(st.booleans())):
            flying.pop(0)
            board.end()
        board.begin(list(step), lambda step=step: list(step.values()))  # type: ignore[misc]
        flying.append(step)
        if data.draw(st.integers(0, 4)) == 0:
            flying.pop()
            board.forget()
        expected: dict[int, int] = {}
        for row in flying:
            for uid, end in row.items():
                expected[uid] = max(end, expected.get(uid, 0))
        assert read_board(memory).keys() == expected.keys()


def test_the_board_has_the_newest_position_of_each_request() -> None:
    for num_steps in (1, 2, 3):
        memory = blank_board(num_steps, 4)
        board = CrashBoard(memory)
        for end in range(10, 30):
            board.begin([3, 5], lambda end=end: [end, end + 7])  # type: ignore[misc]
            assert read_board(memory) == {3: end, 5: end + 7}
            if end >= 10 + num_steps - 1:
                board.end()
        board.begin([5], lambda: [90])
        assert read_board(memory)[5] == 90


def test_rows_beyond_the_capacity_are_left_out() -> None:
    memory = blank_board(2, 3)
    board = CrashBoard(memory)
    board.begin([1, 2, 3, 4, 5], lambda: [6, 6, 6, 6, 6])
    board.begin([9], lambda: [7])
    assert read_board(memory) == {1: 6, 2: 6, 3: 6, 9: 7}


def test_the_board_can_be_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "board"
    path.write_bytes(blank_board(1, 4))
    board = CrashBoard.open(path)
    board.begin([5], lambda: [17])
    assert read_board(path.read_bytes()) == {5: 17}
    board.end()
    assert read_board(path.read_bytes()) == {}


def test_truncated_board_is_a_value_error() -> None:
    memory = blank_board(2, 3)
    CrashBoard(memory).begin([1, 2], lambda: [6, 6])
    for num_bytes in range(len(memory)):
        with pytest.raises(ValueError, match="truncated|multiple|unpack"):
            read_board(memory[:num_bytes])
