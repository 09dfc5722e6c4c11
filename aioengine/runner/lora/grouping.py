"""Group the rows of a step by adapter: row indices per adapter for a CPU, tiles of rows for a GPU.

Except in ``RowAdapters``, a row is a row of the input of a linear layer: a token or an output of the step.

T tokens of a step, S outputs, N tiles of R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from aioengine.kernels.adapter_types import AdapterTiles, max_tiles, rows_of_tile
from aioengine.kernels.arrays import Ints32, Ints64
from aioengine.layers.adapters import Grouping, RowGroups
from aioengine.runner.transfer import Upload

Slots = npt.NDArray[np.int32]
"""The adapter slot of each row of a step; 0: the base model."""

GroupRows = Callable[[Slots], Grouping]
"""Groups the rows of a step for the device."""


def group_on_host(slots: Slots) -> RowGroups:
    """Return the rows of each adapter, for slots [T]."""
    used = np.unique(slots)
    return RowGroups(tuple((slot, torch.from_numpy(np.flatnonzero(slots == slot))) for slot in used.tolist() if slot))


def tile(slots: Slots, *, num_slots: int, size: int) -> tuple[Ints32, Slots]:
    """Return the rows of each tile [N, size], padded with -1, and the slot of each tile [N], for slots [T].

    N depends only on T and ``num_slots``. Unused tiles have slot -1.
    """
    num_rows = len(slots)
    num_tiles = max_tiles(num_rows, num_slots, size)
    rows = np.argsort(slots, kind="stable")
    counts = np.bincount(slots, minlength=num_slots + 1)
    tile_counts = -(-counts // size)
    first_tiles = tile_counts.cumsum() - tile_counts
    first_rows = counts.cumsum() - counts
    ordered = slots[rows]
    order = np.full(num_tiles * size, -1, dtype=np.int32)
    order[(first_tiles * size - first_rows)[ordered] + np.arange(num_rows)] = rows
    tile_slots = np.full(num_tiles, -1, dtype=np.int32)
    tile_slots[: tile_counts.sum()] = np.repeat(np.arange(num_slots + 1), tile_counts)
    return order.reshape(num_tiles, size), tile_slots


@dataclass(frozen=True, slots=True)
class TileRows:
    """Implements ``GroupRows`` for a GPU."""

    num_slots: int
    batch_invariant: bool
    upload: Upload

    def __call__(self, slots: Slots) -> Grouping:
        """Return the tiles for slots [T]."""
        order, tile_slots = tile(slots, num_slots=self.num_slots, size=self.size(len(slots)))
        return AdapterTiles(self.upload(order), self.upload(tile_slots))

    def size(self, num_rows: int) -> int:
        return rows_of_tile(num_rows, batch_invariant=self.batch_invariant)


class StepAdapters:
    """``AdapterRows`` of a step. They are grouped at the first access, because CUDA graphs group them differently.

    Attributes:
        token_slots: [T]. output_slots: [S]; None: all tokens are outputs.
    """

    def __init__(self, token_slots: Slots, output_slots: Slots | None, group: GroupRows) -> None:
        self.token_slots = token_slots
        self.output_slots = output_slots
        self._group = group
        self._tokens: Grouping | None = None
        self._outputs: Grouping | None = None

    @property
    def tokens(self) -> Grouping:
        if self._tokens is None:
            self._tokens = self._group(self.token_slots)
        return self._tokens

    @property
    def outputs(self) -> Grouping:
        if self._outputs is None:
            assert self.output_slots is not None, "the step has no output indices"
            self._outputs = self._group(self.output_slots)
        return self._outputs


class FixedTiles:
    """The tiles of up to T rows, in memory read by CUDA graphs."""

    def __init__(self, max_rows: int, group: TileRows, device: torch.device) -> None:
        self._group = group
        sizes = {group.size(num_rows) for num_rows in (1, max_rows)}
        capacity = max(max_tiles(max_rows, group.num_slots, size) * (size + 1) for size in sizes)
        self._memory = torch.full((capacity,), -1, dtype=torch.int32, device=device)
        self._content: tuple[int, bytes] = (0, b"")

    def for_graph(self, num_rows: int) -> AdapterTiles:
        """Return the tiles that a graph of ``num_rows`` rows reads."""
        size = self._group.size(num_rows)
        num_tiles = max_tiles(num_rows, self._group.num_slots, size)
        order = self._memory[: num_tiles * size].view(num_tiles, size)
        return AdapterTiles(order, self._memory[num_tiles * size : num_tiles * (size + 1)])

    def fill(self, slots: Slots, num_rows: int) -> None:
        """Write the tiles of rows with these slots, for the graph of ``num_rows`` rows. Padding rows use the base
        model.
        """
        content = num_rows, slots.tobytes()
        if content == self._content:
            return
        padded = np.zeros(num_rows, dtype=np.int32)
        padded[: len(slots)] = slots
        order, tile_slots = tile(padded, num_slots=self._group.num_slots, size=self._group.size(num_rows))
        packed = np.concatenate([order.ravel(), tile_slots])
        self._memory[: len(packed)].copy_(self._group.upload(packed))
        self._content = content


@dataclass(frozen=True, slots=True)
class FixedAdapters:
    """``AdapterRows`` of a captured step."""

    tokens: AdapterTiles
    outputs: AdapterTiles


class RowAdapters:
    """The adapter slot of each row of the request table. T tokens of a step, S outputs, R rows.

    Attributes:
        tiles: groups rows for a GPU; None on a CPU, or without adapters.
    """

    def __init__(self, max_rows: int, group: GroupRows | None = None) -> None:
        """group: None without adapters."""
        self.tiles = group if isinstance(group, TileRows) else None
        self._group = group
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

    def slots(self, row_indices: Ints64) -> Slots | None:
        """Return the slots [R] of these rows [R]; None: all rows use the base model."""
        if not self._num_used:
            return None
        slots = self._slots[row_indices]
        return slots if slots.any() else None

    def of_step(self, row_indices: Ints64, row_of_token: Ints64, outputs: Ints64 | None) -> StepAdapters | None:
        """Group the rows of a step by adapter. None: all rows use the base model.

        row_indices: [R]. row_of_token: [T]. outputs: [S] indices of output tokens.
        """
        slots = self.slots(row_indices)
        if slots is None or self._group is None:
            return None
        token_slots = slots[row_of_token]
        return StepAdapters(token_slots, None if outputs is None else token_slots[outputs], self._group)
