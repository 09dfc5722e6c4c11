"""Hidden states of a model that its draft head reads.

They are stored by slot, like the KV cache of the model. So they survive in the same cases: after a prefix hit, between
chunks of a prompt, and after a preemption.

Shape letters: T tokens, D hidden size, F size of all hidden states that a head reads, N slots of the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Features:
    """Keeps the hidden states of the model that a draft head reads.

    Attributes:
        layers: the layers whose inputs it reads. The number of layers stands for the hidden states after the last norm.
        pool: [N, D]; None until it is allocated.
    """

    def __init__(self, layers: tuple[int, ...], reduce: Callable[[Tensor], Tensor]) -> None:
        """reduce: joined hidden states [T, F] -> [T, D]."""
        self.layers = layers
        self.pool: Tensor | None = None
        self._reduce = reduce

    def store(self, states: dict[int, Tensor], slots: Tensor | None) -> None:
        """Keep the hidden states [T, D] by layer in ``slots`` [T]; None: drop them, while memory is measured."""
        features = self._reduce(torch.cat([states[layer] for layer in self.layers], dim=1))
        if slots is not None and self.pool is not None:
            self.pool.index_copy_(0, slots.long(), features)

    def release(self) -> None:
        """Free the memory until ``resume``; not on a GPU, where CUDA graphs contain its address."""
        if self.pool is not None and not self.pool.is_cuda:
            self.pool.untyped_storage().resize_(0)

    def resume(self) -> None:
        """Allocate the memory again."""
        if self.pool is not None and not self.pool.is_cuda:
            self.pool.untyped_storage().resize_(self.pool.nbytes)
            self.pool.zero_()

    def read(self, slots: Tensor) -> Tensor:
        """Return the features of ``slots`` [T]: [T, D]. A failed request may have left non-finite ones, which become
        zeros.
        """
        assert self.pool is not None, "the pool is not allocated"
        return self.pool.index_select(0, slots).nan_to_num_(0.0, 0.0, 0.0)
