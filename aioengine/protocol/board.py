"""The crash board: the requests that a process computes right now, in memory that outlives the process.

A board is an array of integers. It begins with the number of places (one for each step in flight) and the maximum
number of rows per place. Each place has the number of rows, the number of steps since they were written, their uids,
and the end positions of their rows at that time. The same requests usually decode one position per step for many steps,
so most steps change two integers. A memory-mapped file keeps the last write, even if the process is killed.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Final

_CELL: Final = "q"
_CELL_BYTES: Final = 8
NO_END: Final = -(1 << 40)
"""An unknown end position."""

_HEAD: Final = 2
_PLACE_HEAD: Final = 2


def blank_board(num_steps: int, max_rows: int) -> bytearray:
    """Return the memory of an empty board. Rows of a step beyond ``max_rows`` are not recorded."""
    cells = array(_CELL, [num_steps, max_rows])
    return bytearray(cells.tobytes()) + bytearray(_CELL_BYTES * num_steps * (_PLACE_HEAD + 2 * max_rows))


class CrashBoard:
    """Writes a board. Steps begin and end in the same order."""

    def __init__(self, memory: bytearray | mmap.mmap) -> None:
        self._cells = memoryview(memory).cast(_CELL)
        self._num_places, self._max_rows = self._cells[:_HEAD]
        self._place_cells = _PLACE_HEAD + 2 * self._max_rows
        self._written: list[tuple[list[int], int]] = [([], 0)] * self._num_places  # uids, and number of their step
        self._num_begun = 0
        self._num_ended = 0

    @classmethod
    def open(cls, path: Path) -> CrashBoard:
        """Open the board in a file with the bytes of ``blank_board``.

        Raises:
            OSError: the file cannot be opened.
        """
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), 0))

    def begin(self, uids: list[int], ends: Callable[[], list[int]] | None = None) -> None:
        """Record that a step with these rows begins.

        ends: returns their end positions; called if the requests of its place have changed. None: they are unknown.
        """
        number = self._num_begun
        self._num_begun += 1
        cells, max_rows = self._cells, self._max_rows
        place = _HEAD + number % self._num_places * self._place_cells
        num_rows = min(len(uids), max_rows)
        written, written_at = self._written[number % self._num_places]
        if uids != written:
            written_at = number
            self._written[number % self._num_places] = uids, number
            first = place + _PLACE_HEAD
            cells[first : first + num_rows] = array(_CELL, uids[:num_rows])
            first += max_rows
            end_positions = [NO_END] * num_rows if ends is None else ends()[:num_rows]
            cells[first : first + num_rows] = array(_CELL, end_positions)
        cells[place + 1] = number - written_at
        cells[place] = num_rows

    def end(self) -> None:
        """Record the end of the oldest step."""
        self._cells[_HEAD + self._num_ended % self._num_places * self._place_cells] = 0
        self._num_ended += 1

    def forget(self) -> None:
        """Remove the newest step, because its launch failed."""
        self._num_begun -= 1
        self._cells[_HEAD + self._num_begun % self._num_places * self._place_cells] = 0


def read_board(memory: bytes | bytearray) -> dict[int, int]:
    """Return the rows of steps in flight: uid -> end position.

    The end may be too early if the same requests computed more than one position per step.

    Raises:
        ValueError: the board is truncated.
    """
    cells = array(_CELL)
    cells.frombytes(memory)
    num_places, max_rows = cells[:_HEAD]
    place_cells = _PLACE_HEAD + 2 * max_rows
    if len(cells) < _HEAD + num_places * place_cells:
        raise ValueError(f"the crash board is truncated to {len(memory)} bytes")
    rows: dict[int, int] = {}
    for number in range(num_places):
        place = _HEAD + number * place_cells
        num_rows, age = cells[place : place + _PLACE_HEAD]
        first = place + _PLACE_HEAD
        uids = cells[first : first + num_rows]
        ends = cells[first + max_rows : first + max_rows + num_rows]
        for uid, end in zip(uids, ends, strict=True):
            rows[uid] = max(end + age, rows.get(uid, 0))
    return rows
