"""Embedding table, which may also be the output head.

Shape letters: T tokens, D hidden size, V vocabulary size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.kernels import linear
from aioengine.layers.layer import Layer
from aioengine.layers.placement import Target

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.kernels.linear import Matmul
    from aioengine.layers.placement import Placement


class EmbeddingTable(Layer):
    """[T] ids -> [T, D]."""

    def __init__(self, weight: Tensor, placement: Placement) -> None:
        """Use the weight [V, D]."""
        self.weight = weight
        self._batch_invariant = placement.batch_invariant
        self._head: Matmul | None = None

    def own_weights(self) -> dict[str, Target]:
        return {"weight": Target(self.weight)}

    def __call__(self, input_ids: Tensor) -> Tensor:
        """[T] int64 ids -> [T, D]."""
        return self.weight.index_select(0, input_ids)

    def as_head(self) -> Matmul:
        """Return the matmul [T, D] -> [T, V] with this weight, for models with tied embeddings.

        Call it again after new weights are loaded. On a CPU the matmul reads a packed copy, which is then replaced.
        """
        if self._head is None or linear.packs(self.weight.dtype, self.weight.device):
            self._head = linear.prepare(self.weight, None, batch_invariant=self._batch_invariant)
        return self._head
