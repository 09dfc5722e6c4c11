"""LoRA adapters of linear layers.

On a CPU, the rows of each adapter are multiplied separately. On a GPU, all rows are multiplied at once.

Shape letters: T rows of a step, X rows of one adapter, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from aioengine.kernels import linear
from aioengine.kernels.activation import activate_and_mul
from aioengine.kernels.adapter_types import AdapterTiles, AdapterWeights
from aioengine.kernels.row_counts import Matmul


@dataclass(frozen=True, slots=True)
class RowGroups:
    """The rows of a step by adapter, for a CPU. ``groups``: (adapter slot from 1, row indices [X] int64) pairs."""

    groups: tuple[tuple[int, Tensor], ...]


Grouping = RowGroups | AdapterTiles


class AdapterRows(Protocol):
    """The rows of a step, grouped by adapter."""

    @property
    def tokens(self) -> Grouping:
        """The grouping of all T tokens."""
        ...

    @property
    def outputs(self) -> Grouping:
        """The grouping of the tokens in ``ModelInputs.outputs``."""
        ...


class PooledAdapters:
    """The adapters of a layer on a GPU, in slots of a pool."""

    def __init__(self, weights: AdapterWeights, *, is_gated: bool) -> None:
        self._weights = weights
        self._is_gated = is_gated

    def add(self, matmul: Matmul, x: Tensor, grouping: Grouping) -> Tensor:
        """Return ``matmul(x)`` plus the adapter outputs: x [T, I] -> [T, O].

        For a gated layer, return silu(gate) * up: [T, O / 2].
        """
        assert isinstance(grouping, AdapterTiles), "rows are grouped for a CPU"
        from aioengine.kernels.triton import adapter_linear

        is_one_part = len(self._weights.sizes) == 1  # the checkpoint fuses gate and up
        gates_in_kernel = self._is_gated and not is_one_part
        y = adapter_linear.add(matmul, x.contiguous(), self._weights, grouping, is_gated=gates_in_kernel)
        return activate_and_mul(y, "silu") if self._is_gated and is_one_part else y


class LayerMatrices:
    """The matrices of one adapter for one layer on a CPU. The bits of a row do not depend on X."""

    def __init__(self, a: Tensor, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Prepare the matrices.

        Args:
            a: A of all parts, [sum of ranks, I].
            parts: (first output, B [outputs, rank]) of each part that the adapter changes.
        """
        self._shrink = linear.prepare(a, None)
        # per fused part: rank, first output, number of outputs, and matmul with B: [X, rank] -> [X, outputs]
        self._expansions: list[tuple[int, int, int, Matmul]] = []
        for first_output, b in parts:
            num_outputs, rank = b.shape
            self._expansions.append((rank, first_output, num_outputs, linear.prepare(b, None)))

    def add(self, y: Tensor, x: Tensor, rows: Tensor) -> None:
        """Add the adapter's output for the ``rows`` [X] of x [T, I] to y [T, O], in place."""
        inner = self._shrink(x.index_select(0, rows))
        inputs = inner.split([rank for rank, *_ in self._expansions], dim=1)
        for part, (_, first_output, num_outputs, matmul) in zip(inputs, self._expansions, strict=True):
            y.narrow(1, first_output, num_outputs).index_add_(0, rows, matmul(part.contiguous()))


class HostAdapters:
    """The adapters of a layer on a CPU.

    Attributes:
        slots: the matrices by adapter slot, from 1; None for an adapter that does not change the layer.
    """

    def __init__(self, num_slots: int, *, is_gated: bool) -> None:
        self.slots: list[LayerMatrices | None] = [None] * (num_slots + 1)
        self._is_gated = is_gated

    def add(self, matmul: Matmul, x: Tensor, grouping: Grouping) -> Tensor:
        """x [T, I] -> [T, O], or [T, O / 2]; see ``PooledAdapters.add``."""
        assert isinstance(grouping, RowGroups), "rows are grouped for a GPU"
        y = matmul(x)
        for slot, chosen in grouping.groups:
            if (matrices := self.slots[slot]) is not None:
                matrices.add(y, x, chosen)
        return activate_and_mul(y, "silu") if self._is_gated else y


LayerAdapters = PooledAdapters | HostAdapters
"""The adapters of one linear layer."""
