"""How the adapters of linear layers are stored on a GPU, and how the rows of a step are grouped by adapter.

The adapters are in slots of a pool, each with a table of its matrices at the beginning, so that a slot is filled by one
copy. A layer may fuse several parts, with matrices of their own; a rank is a multiple of ``RANKS``, and that of a part
which an adapter does not change is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

RANKS = 16
"""Ranks are padded to a multiple of this with zeros."""
UNIT = 16
"""Numbers: matrices begin at multiples of this in a slot, and the size of a slot is one."""
TABLE_COLUMNS = 4
"""Of the entry of a part in the table at the beginning of a slot, int32: its rank in ``RANKS``, where A [rank, I] and
B [O, rank] begin in ``UNIT``, and 0.
"""
FEW_ROWS_OF_TILE, MANY_ROWS_OF_TILE = 16, 64
_MANY_ROWS = 256
"""From more rows than this on, tiles are large."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The rows of a step, grouped by adapter. Every row is in one tile.

    Attributes:
        order: [N, R] int32, the rows of each tile; -1 behind the last of a tile.
        slots: [N] int32, the slot of its adapter, from 1; 0: rows of the base model; -1: an unused tile.
    """

    order: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """The adapters of one linear layer, which may fuse several parts.

    Attributes:
        pool: [slots, numbers of a slot]. table: the same memory as int32.
        first_part: the entry of the first part in the table of a slot.
        size: I. sizes: O of each part.
        max_rank: the highest rank of an adapter, a multiple of ``RANKS``.
    """

    pool: Tensor
    table: Tensor
    first_part: int
    size: int
    sizes: tuple[int, ...]
    max_rank: int


def rows_of_tile(num_rows: int, *, batch_invariant: bool) -> int:
    """The rows of a tile in a step of ``num_rows`` rows."""
    return FEW_ROWS_OF_TILE if batch_invariant or num_rows <= _MANY_ROWS else MANY_ROWS_OF_TILE


def most_tiles(num_rows: int, num_slots: int, size: int) -> int:
    """The most tiles of ``size`` rows that a step of ``num_rows`` rows can have."""
    num_groups = min(num_rows, num_slots + 1)
    return num_groups + (num_rows - num_groups) // size
