"""The adapters of open requests. T tokens of a step, S outputs, R rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from aioengine.runner.lora.grouping import Slots, StepAdapters, TileRows
    from aioengine.runner.lora.pool import AdapterPool

    Ints = npt.NDArray[np.int64]


class RowAdapters:
    """The adapter slot of each row of the request table. pool: None: all rows use the base model."""

    def __init__(self, max_rows: int, pool: AdapterPool | None = None) -> None:
        self.pool = pool
        self._slots = np.zeros(max_rows, dtype=np.int32)
        self._num_used = 0

    @property
    def num_slots(self) -> int:
        return 0 if self.pool is None else self.pool.num_slots

    @property
    def tiles(self) -> TileRows | None:
        """See ``AdapterPool.tiles``."""
        return None if self.pool is None else self.pool.tiles

    def open(self, row_index: int, slot: int) -> None:
        """Set the adapter slot of a row, counted from 1; 0: the base model.

        Raises:
            ValueError: the slot does not exist.
        """
        if not 0 <= slot <= self.num_slots:
            raise ValueError(f"adapter slot must be at most {self.num_slots}, got {slot}")
        if slot:
            self._num_used += 1
            self._slots[row_index] = slot

    def close(self, row_index: int) -> None:
        if self._num_used and self._slots[row_index]:
            self._num_used -= 1
            self._slots[row_index] = 0

    def slots(self, row_indices: Ints) -> Slots | None:
        """Return the slots [R] of these rows [R]; None: all rows use the base model."""
        if not self._num_used:
            return None
        slots = self._slots[row_indices]
        return slots if slots.any() else None

    def of_step(self, row_indices: Ints, row_of_token: Ints, outputs: Ints | None) -> StepAdapters | None:
        """Group the rows of a step by adapter. None: all rows use the base model.

        row_indices: [R]. row_of_token: [T]. outputs: [S] indices of output tokens.
        """
        slots = self.slots(row_indices)
        if slots is None or self.pool is None:
            return None
        token_slots = slots[row_of_token]
        return self.pool.rows(token_slots, None if outputs is None else token_slots[outputs])

    def release(self) -> None:
        """Wait for copies to the device in progress, and allow no further copies."""
        if self.pool is not None:
            self.pool.close()
