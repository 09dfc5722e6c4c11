"""LoRA adapters of linear layers: what a layer adds to its result for the rows of a step that use one.

On a CPU an adapter's rows are multiplied together, adapter by adapter; on a GPU all rows at once. T rows of a step, X
rows of one adapter, D input size, O output size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from aioengine.kernels import adapter_linear, linear, silu_and_mul
from aioengine.kernels.adapter_slots import AdapterTiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from aioengine.kernels.adapter_slots import AdapterWeights
    from aioengine.kernels.linear import Matmul


@dataclass(frozen=True, slots=True)
class Groups:
    """The rows of a step by adapter, for a CPU. ``groups``: each slot that is used, from 1, and [X] int64 rows."""

    groups: tuple[tuple[int, Tensor], ...]


Grouping = Groups | AdapterTiles


class AdapterRows(Protocol):
    """The rows of a step, grouped by adapter."""

    @property
    def tokens(self) -> Grouping:
        """Of all T tokens."""
        ...

    @property
    def outputs(self) -> Grouping:
        """Of the tokens of ``ModelInputs.outputs``, where there are any."""
        ...


class LayerAdapters(Protocol):
    """The adapters of one linear layer."""

    def add(self, matmul: Matmul, x: Tensor, rows: Grouping) -> Tensor:
        """The result [T, O] of the layer's ``matmul`` for x [T, D] with what the adapters of the rows add to it.

        Of a gated layer, silu(gate) * up [T, O / 2].
        """
        ...


class PooledAdapters:
    """The adapters of a layer on a GPU, in the slots of a pool."""

    def __init__(self, weights: AdapterWeights, *, is_gated: bool) -> None:
        self._weights = weights
        self._is_gated = is_gated

    def add(self, matmul: Matmul, x: Tensor, rows: Grouping) -> Tensor:
        """x [T, D] -> [T, O], or [T, O / 2]; see ``LayerAdapters``."""
        assert isinstance(rows, AdapterTiles), "the rows are grouped for a CPU"
        return adapter_linear.add(matmul, x.contiguous(), self._weights, rows, is_gated=self._is_gated)


@dataclass(frozen=True, slots=True)
class _Expansion:
    """B of one part: [X, rank] -> [X, num_outputs], from ``first_rank`` and ``first_output`` on."""

    first_rank: int
    rank: int
    first_output: int
    num_outputs: int
    matmul: Matmul


class LayerMatrices:
    """One adapter's matrices for one layer, prepared for a CPU: each product gives a row the same bits for any X."""

    def __init__(self, a: Tensor, parts: Sequence[tuple[int, Tensor]]) -> None:
        """a: [ranks of all parts, D]. parts: the first output and B [outputs, rank] of each part that is changed."""
        self._shrink = linear.prepare(linear.pack(a), None)
        self._expansions: list[_Expansion] = []
        first_rank = 0
        for first_output, b in parts:
            num_outputs, rank = b.shape
            matmul = linear.prepare(linear.pack(b), None)
            self._expansions.append(_Expansion(first_rank, rank, first_output, num_outputs, matmul))
            first_rank += rank

    def add(self, y: Tensor, x: Tensor, rows: Tensor) -> None:
        """Add to the ``rows`` [X] of y [T, O], in place, what the adapter makes of those of x [T, D]."""
        inner = self._shrink(x.index_select(0, rows))
        for part in self._expansions:
            more = part.matmul(inner.narrow(1, part.first_rank, part.rank).contiguous())
            y.narrow(1, part.first_output, part.num_outputs).index_add_(0, rows, more)


class HostAdapters:
    """The adapters of a layer on a CPU. ``slots``: by slot, from 1; None: that adapter does not change the layer."""

    def __init__(self, num_slots: int, *, is_gated: bool) -> None:
        self.slots: list[LayerMatrices | None] = [None] * (num_slots + 1)
        self._is_gated = is_gated

    def add(self, matmul: Matmul, x: Tensor, rows: Grouping) -> Tensor:
        """x [T, D] -> [T, O], or [T, O / 2]; see ``LayerAdapters``."""
        assert isinstance(rows, Groups), "the rows are grouped for a GPU"
        y = matmul(x)
        for slot, chosen in rows.groups:
            if (matrices := self.slots[slot]) is not None:
                matrices.add(y, x, chosen)
        return silu_and_mul.silu_and_mul(y) if self._is_gated else y
