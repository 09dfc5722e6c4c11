"""What a process computes right now, written where it outlives the process: so a crash names the requests in its step.

A board is memory of whole numbers. First stand how many steps it has places for, and how many rows each; then, for each
place, the number of rows, their uids, and the ends of what they compute. A file that a process has mapped keeps what
was written last, in whatever way the process ends.
"""

from __future__ import annotations

import mmap
from array import array
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_CELL: Final = "q"
_CELL_BYTES: Final = 8
_HEAD: Final = 2


def blank_board(num_steps: int, max_rows: int) -> bytearray:
    """The memory of a board with nothing on it; rows beyond ``max_rows`` of a step will be left out."""
    cells = array(_CELL, [num_steps, max_rows])
    return bytearray(cells.tobytes()) + bytearray(_CELL_BYTES * num_steps * (1 + 2 * max_rows))


class StepBoard:
    """The writing side. Steps are begun and ended in the same order."""

    def __init__(self, memory: bytearray | mmap.mmap) -> None:
        self._cells = memoryview(memory).cast(_CELL)
        self._num_places, self._max_rows = self._cells[:_HEAD]
        self._num_begun = 0
        self._num_ended = 0

    @classmethod
    def open(cls, path: Path) -> StepBoard:
        """The board in a file, which ``blank_board`` made.

        Raises:
            OSError: it cannot be opened.
        """
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), 0))

    def begin(self, uids: Sequence[int], ends: Sequence[int]) -> None:
        """A step with these rows begins."""
        place = self._place(self._num_begun)
        self._num_begun += 1
        num_rows = min(len(uids), self._max_rows)
        if num_rows:
            first = place + 1
            self._cells[first : first + num_rows] = array(_CELL, uids[:num_rows])
            first += self._max_rows
            self._cells[first : first + num_rows] = array(_CELL, ends[:num_rows])
        self._cells[place] = num_rows

    def end(self) -> None:
        """The oldest step is over."""
        self._cells[self._place(self._num_ended)] = 0
        self._num_ended += 1

    def forget(self) -> None:
        """The newest step has not begun after all."""
        self._num_begun -= 1
        self._cells[self._place(self._num_begun)] = 0

    def _place(self, number: int) -> int:
        return _HEAD + number % self._num_places * (1 + 2 * self._max_rows)


def read_board(memory: bytes | bytearray) -> dict[int, int]:
    """What a board says: the rows of the steps that have begun and not ended, uid -> end."""
    cells = memoryview(memory).cast(_CELL)
    num_places, max_rows = cells[:_HEAD]
    rows: dict[int, int] = {}
    for number in range(num_places):
        place = _HEAD + number * (1 + 2 * max_rows)
        num_rows = cells[place]
        uids = cells[place + 1 : place + 1 + num_rows].tolist()
        ends = cells[place + 1 + max_rows : place + 1 + max_rows + num_rows].tolist()
        for uid, end in zip(uids, ends, strict=True):
            rows[uid] = max(end, rows.get(uid, 0))
    return rows
