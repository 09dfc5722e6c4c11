"""The adapters of open requests. T tokens of a step, S outputs, R rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from aioengine.runner.lora.grouping import Slots, StepAdapters
    from aioengine.runner.lora.pool import AdapterPool
    from aioengine.runner.transfer import Ints


class RowAdapters:
    """The adapter slot of each row of the request table.

    Attributes:
        tiles: see ``AdapterPool.tiles``; None without adapters.
    """

    def __init__(self, max_rows: int, pool: AdapterPool | None = None) -> None:
        self.tiles = None if pool is None else pool.tiles
        self._pool = pool
        self._slots = np.zeros(max_rows, dtype=np.int32)
        self._num_used = 0

    def open(self, row_index: int, slot: int) -> None:
        """Set the adapter slot of a row, counted from 1; 0: the base model."""
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
        if slots is None or self._pool is None:
            return None
        token_slots = slots[row_of_token]
        return self._pool.rows(token_slots, None if outputs is None else token_slots[outputs])
