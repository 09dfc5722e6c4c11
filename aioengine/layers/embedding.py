"""Token embedding, which may also be the output head. T tokens, D model size, V vocabulary."""

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

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        self.weight = placement.empty(vocab_size, hidden_size)
        self._batch_invariant = placement.batch_invariant
        self._head: Matmul | None = None

    def tensors(self) -> dict[str, Target]:
        return {"weight": Target(self.weight)}

    def __call__(self, input_ids: Tensor) -> Tensor:
        """[T] int64 ids -> [T, D]."""
        return self.weight.index_select(0, input_ids)

    def as_head(self) -> Matmul:
        """The matmul [T, D] -> [T, V] with the embedding's weight, for models with tied embeddings.

        To be called again after new weights were loaded. It returns the same matmul if that reads the weight tensor
        directly; on a CPU, where the matmul reads a packed copy, a new one.
        """
        if self._head is None or linear.packs(self.weight.dtype, self.weight.device):
            self._head = linear.prepare(self.weight, None, batch_invariant=self._batch_invariant)
        return self._head
