"""Layout of LoRA adapters on a GPU, and the grouping of the rows of a step by adapter.

Adapters are stored in slots of a pool. Each slot starts with a table of its matrices, so one copy fills a slot. A fused
layer has several parts, each with its own matrices. Ranks are multiples of ``RANK_UNIT``; the rank of a part that an
adapter does not change is 0.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from aioengine.settings.config import ADAPTER_RANK_UNIT

RANK_UNIT = ADAPTER_RANK_UNIT
"""Ranks are padded with zeros to a multiple of this."""
UNIT = 16
"""Matrices start at multiples of this many elements, and the size of a slot is a multiple of it."""
TABLE_COLUMNS = 4
"""int32 columns of a table entry (one entry per part): rank / ``RANK_UNIT``, start of A [rank, I] / ``UNIT``, start of
B [O, rank] / ``UNIT``, and 0.
"""
FEW_ROWS_OF_TILE, MANY_ROWS_OF_TILE = 16, 64
_MANY_ROWS = 256
"""Steps with more rows use tiles of ``MANY_ROWS_OF_TILE`` rows."""


class AdapterTiles(NamedTuple):
    """The rows of a step, grouped by adapter. Every row is in one tile.

    Attributes:
        order: [N, R] int32, the rows of each tile, padded with -1.
        slots: [N] int32, the adapter slot of each tile, counted from 1; 0: the base model; -1: an unused tile.
    """

    order: Tensor
    slots: Tensor


class AdapterWeights(NamedTuple):
    """The adapters of one linear layer, which may consist of several fused parts.

    Attributes:
        pool: [slots, elements per slot]. table: the same memory as int32.
        first_part: index of the first part in the table of a slot.
        size: I. sizes: O of each part.
        max_rank: the maximum rank of an adapter, a multiple of ``RANK_UNIT``.
    """

    pool: Tensor
    table: Tensor
    first_part: int
    size: int
    sizes: tuple[int, ...]
    max_rank: int


def rows_of_tile(num_rows: int, *, batch_invariant: bool) -> int:
    """Return the tile size for a step of ``num_rows`` rows."""
    return FEW_ROWS_OF_TILE if batch_invariant or num_rows <= _MANY_ROWS else MANY_ROWS_OF_TILE


def max_tiles(num_rows: int, num_slots: int, size: int) -> int:
    """Return the maximum number of tiles of ``size`` rows in a step of ``num_rows`` rows."""
    num_groups = min(num_rows, num_slots + 1)
    return num_groups + (num_rows - num_groups) // size
