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
    """The slot of the adapter of each row of the table of requests. ``pool``: None: all use the base model."""

    def __init__(self, max_rows: int, pool: AdapterPool | None = None) -> None:
        self.pool = pool
        self._slots = np.zeros(max_rows, dtype=np.int32)
        self._num_used = 0

    @property
    def num_slots(self) -> int:
        return 0 if self.pool is None else self.pool.num_slots

    @property
    def tiles(self) -> TileRows | None:
        """As ``AdapterPool.tiles``."""
        return None if self.pool is None else self.pool.tiles

    def open(self, row_index: int, slot: int) -> None:
        """Set the slot of a row's adapter, from 1; 0: it uses the base model.

        Raises:
            ValueError: there is no such slot.
        """
        if not 0 <= slot <= self.num_slots:
            raise ValueError(f"adapter slot {slot} of {self.num_slots}")
        if slot:
            self._num_used += 1
            self._slots[row_index] = slot

    def close(self, row_index: int) -> None:
        if self._num_used and self._slots[row_index]:
            self._num_used -= 1
            self._slots[row_index] = 0

    def slots(self, row_indices: Ints) -> Slots | None:
        """The slots [R] of these rows [R]; None: all use the base model."""
        if not self._num_used:
            return None
        slots = self._slots[row_indices]
        return slots if slots.any() else None

    def of_step(self, row_indices: Ints, row_of_token: Ints, outputs: Ints | None) -> StepAdapters | None:
        """The rows of a step by adapter; None: all use the base model.

        row_indices [R], the row of each token [T], and the tokens that are outputs [S].
        """
        slots = self.slots(row_indices)
        if slots is None or self.pool is None:
            return None
        token_slots = slots[row_of_token]
        return self.pool.rows(token_slots, None if outputs is None else token_slots[outputs])

    def release(self) -> None:
        """Wait for copies to the device that have begun; no other begins."""
        if self.pool is not None:
            self.pool.close()
