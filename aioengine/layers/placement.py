"""Device, dtype and shard of a model's weights, and the checkpoint tensors that fill them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.quantization._base import LinearFormat


class Shard(NamedTuple):
    """Tensor parallelism: this rank, of the ``size`` ranks among which linear layers are divided."""

    rank: int = 0
    size: int = 1


WHOLE = Shard()
"""A model on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How and where a model stores its weights.

    Attributes:
        dtype: of the weights and activations; a ``linear_format`` may store other types.
        linear_format: how linear layers store and multiply their weights.
        batch_invariant: on a GPU, the result for a row must not depend on the number of rows.
        shard: the share of divided layers that this process has.
    """

    dtype: torch.dtype
    device: torch.device
    linear_format: LinearFormat
    batch_invariant: bool = False
    shard: Shard = WHOLE

    def empty(self, *shape: int) -> Tensor:
        """An uninitialized tensor [*shape]."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Slice(NamedTuple):
    """Part of a checkpoint tensor: entries from ``start`` on of dimension ``dim``, which has ``total`` entries."""

    dim: int
    start: int
    total: int


class Target(NamedTuple):
    """A tensor to load into, often a view of a fused one, and the part of the checkpoint tensor to load.

    ``source``: None for the whole checkpoint tensor; the length of a slice is that of ``tensor``.
    """

    tensor: Tensor
    source: Slice | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole checkpoint tensor."""
        shape = list(self.tensor.shape)
        if self.source is not None:
            shape[self.source.dim] = self.source.total
        return tuple(shape)

    @property
    def index(self) -> tuple[slice, ...]:
        """The index of ``source`` in the checkpoint tensor; () for the whole of it."""
        if self.source is None:
            return ()
        dim, start, _ = self.source
        return (*[slice(None)] * dim, slice(start, start + self.tensor.shape[dim]))
