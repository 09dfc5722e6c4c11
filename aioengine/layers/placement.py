"""Device, dtype and shard of a model's weights, and the checkpoint tensors that fill them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.quantization._base import LinearFormat


class Shard(NamedTuple):
    """The rank of this model among the ``size`` ranks that its linear layers are divided among."""

    rank: int = 0
    size: int = 1


WHOLE = Shard()
"""A model on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """``linear_format``: how linear layers store and multiply their weights."""

    dtype: torch.dtype
    device: torch.device
    linear_format: LinearFormat
    batch_invariant: bool = False
    shard: Shard = WHOLE

    def empty(self, *shape: int) -> Tensor:
        """A tensor [*shape] without values."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Slice(NamedTuple):
    """A part of a checkpoint tensor, along one dimension: from ``start`` on, of ``total`` entries."""

    dim: int
    start: int
    total: int


class Target(NamedTuple):
    """A tensor to be loaded, often a view of a fused one, and the part of the checkpoint tensor that it is filled with.

    ``source`` None: the whole of it.
    """

    tensor: Tensor
    source: Slice | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor in the checkpoint."""
        shape = list(self.tensor.shape)
        if self.source is not None:
            shape[self.source.dim] = self.source.total
        return tuple(shape)

    @property
    def index(self) -> tuple[slice, ...]:
        """What is taken of the tensor in the checkpoint; of the dimensions that are not named, all."""
        if self.source is None:
            return ()
        dim, start, _ = self.source
        return (*[slice(None)] * dim, slice(start, start + self.tensor.shape[dim]))
