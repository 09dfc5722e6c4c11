"""Where the matrices of adapters are in a slot of the pool.

A slot begins with a table of all parts of all layers (``kernels.adapter_linear``); behind it come the matrices of the
parts that the adapter changes, at the places that the table names: an adapter takes the room of its own ranks.
D input size, O output size of a part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aioengine.kernels.adapter_slots import RANKS, TABLE_COLUMNS, UNIT

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt
    from torch import Tensor

    from aioengine.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A linear layer whose result adapters change. ``first_part``: the entry of its first part in the table."""

    linear: Linear
    names: tuple[str, ...]
    first_part: int


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a part's matrices: A [rank, D] begins at number ``first_a`` of the slot, B [O, rank] at ``first_b``.

    The rank is a multiple of ``RANKS``.
    """

    rank: int
    first_a: int
    first_b: int


def padded_rank(rank: int) -> int:
    return -(-rank // RANKS) * RANKS


class Layout:
    """The layout of all slots, for the layers of a model.

    Attributes:
        layers: those that adapters may change. shapes: (outputs, inputs) of each part, by its name in the checkpoint.
        max_rank: the highest rank, a multiple of ``RANKS``.
    """

    def __init__(self, linears: Iterable[tuple[str, Linear]], *, max_rank: int, modules: tuple[str, ...]) -> None:
        """``modules``: the parts that adapters may change, by the last part of their names; empty: all."""
        self.max_rank = padded_rank(max_rank)
        self.layers: list[AdaptedLayer] = []
        self.shapes: dict[str, tuple[int, int]] = {}
        self._orders: dict[str, Tensor] = {}
        for prefix, linear in linears:
            names = tuple(f"{prefix}{part}" for part in linear.sizes)
            self.shapes |= {
                name: (size, linear.in_features) for name, size in zip(names, linear.sizes.values(), strict=True)
            }
            if linear.stored.order is not None:
                self._orders |= zip(names, linear.stored.order.cpu().split([*linear.sizes.values()]), strict=True)
            if not modules or any(part in modules for part in linear.sizes):
                first = self.layers[-1].first_part + len(self.layers[-1].names) if self.layers else 0
                self.layers.append(AdaptedLayer(linear, names, first))
        self._names = [name for layer in self.layers for name in layer.names]
        self._modules = modules

    def order(self, name: str) -> Tensor | None:
        """Where the checkpoint has each output [O] of this part; None: in the same order."""
        order = self._orders.get(name)
        return None if order is None else order - order.min()

    def places(self, ranks: dict[str, int]) -> tuple[dict[str, Place], int]:
        """The places of the matrices of an adapter with these ranks, by part, and the size of its slot in numbers."""
        found: dict[str, Place] = {}
        end = self._table_size
        for name in self._names:
            if name not in ranks:
                continue
            (num_outputs, size), rank = self.shapes[name], padded_rank(ranks[name])
            first_b = end + _whole(rank * size)
            found[name] = Place(rank, end, first_b)
            end = first_b + _whole(num_outputs * rank)
        return found, end

    def table(self, places: dict[str, Place]) -> npt.NDArray[np.int32]:
        """The table [parts, TABLE_COLUMNS] at the beginning of a slot."""
        table = np.zeros((len(self._names), TABLE_COLUMNS), dtype=np.int32)
        for index, name in enumerate(self._names):
            if (place := places.get(name)) is not None:
                table[index, :3] = place.rank // RANKS, place.first_a // UNIT, place.first_b // UNIT
        return table

    @property
    def slot_size(self) -> int:
        """Numbers of a slot, which an adapter of the highest rank fills that changes all it may."""
        names = [name for name in self._names if not self._modules or name.rpartition(".")[2] in self._modules]
        return self.places(dict.fromkeys(names, self.max_rank))[1]

    @property
    def _table_size(self) -> int:
        """Numbers of 16 bits that the table takes; also the room that is kept for it where numbers are wider."""
        return _whole(len(self._names) * TABLE_COLUMNS * 2)


def _whole(size: int) -> int:
    return -(-size // UNIT) * UNIT
