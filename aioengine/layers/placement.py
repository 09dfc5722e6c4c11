"""Device, dtype and shard of weights, and the targets that checkpoint tensors are loaded into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from aioengine.quantization._base import LinearFormat


class Shard(NamedTuple):
    """Tensor parallelism: this rank, and the number of ranks that share the linear layers."""

    rank: int = 0
    size: int = 1


WHOLE = Shard()
"""The shard of a model on a single rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How and where a model stores its weights.

    Attributes:
        dtype: of weights and activations. A ``linear_format`` may store weights in another dtype.
        linear_format: how linear layers store and multiply their weights.
        batch_invariant: on a GPU, the result of a row must not depend on the number of rows.
        shard: the shard of this process.
    """

    dtype: torch.dtype
    device: torch.device
    linear_format: LinearFormat
    batch_invariant: bool = False
    shard: Shard = WHOLE

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialized tensor [*shape]."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Slice(NamedTuple):
    """A slice of a checkpoint tensor along ``dim``, from ``start``. ``total``: the full size of the dimension."""

    dim: int
    start: int
    total: int


class Target(NamedTuple):
    """A tensor to load into, often a view of a fused tensor.

    Attributes:
        source: the slice of the checkpoint tensor to load; None for all of it. Its length is that of ``tensor``.
    """

    tensor: Tensor
    source: Slice | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint tensor."""
        shape = list(self.tensor.shape)
        if self.source is not None:
            shape[self.source.dim] = self.source.total
        return tuple(shape)

    @property
    def index(self) -> tuple[slice, ...]:
        """The index of ``source`` in the checkpoint tensor; () for all of it."""
        if self.source is None:
            return ()
        dim, start, _ = self.source
        return (*[slice(None)] * dim, slice(start, start + self.tensor.shape[dim]))
