"""The base class of the parts of a model, where their weights are, and the targets that tensors are loaded into."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from aioengine.layers.ranks import RankGroup
from aioengine.quantization._base import CodesFormat, LinearFormat, RowWriter


class Layer:
    """A part of a model, which may consist of other layers.

    Attributes:
        is_adaptable: whether adapters may change the linear layers in it.
        parts: the layers of this layer, each with the prefix of its tensor names; entries with None are skipped.
    """

    is_adaptable: bool = True
    parts: Sequence[tuple[str, Layer | None]] = ()

    def own_weights(self) -> dict[str, Target]:
        """Map tensor names to targets, without the tensors of ``parts``."""
        return {}

    def weights(self, prefix: str = "") -> dict[str, Target]:
        """Map tensor names in the checkpoint to targets, for this layer and its parts.

        Layers that are not open for loading may have no targets.
        """
        targets = {f"{prefix}{name}": target for name, target in self.own_weights().items()}
        for part_prefix, part in self.parts:
            if part is not None:
                targets |= part.weights(f"{prefix}{part_prefix}")
        return targets

    def finish_loading(self) -> None:
        """Convert the loaded weights to the form that the kernels read, in all layers that are open for loading."""
        for _, part in self.parts:
            if part is not None:
                part.finish_loading()

    def open_for_loading(self, prefix: str = "", modules: Collection[str] | None = None) -> None:
        """Make targets of ``weights`` valid again. Their tensors have the current values.

        Args:
            prefix: of the tensor names of this layer, as in ``weights``.
            modules: names of tensors without their last part, such as "model.layers.0.mlp.up_proj". Only layers with
                such tensors are opened, because opening copies weights that the kernels read in another form. None:
                all layers.
        """
        for part_prefix, part in self.parts:
            if part is not None:
                part.open_for_loading(f"{prefix}{part_prefix}", modules)

    def free_weights(self) -> None:
        """Free the large weights. The layer is then open for loading, and all weights must be loaded."""
        for _, part in self.parts:
            if part is not None:
                part.free_weights()


class Shard(NamedTuple):
    """Tensor parallelism: this rank, and the number of ranks that share the linear layers.

    ``group``: None: there is one rank, or the caller adds the results (in tests).
    """

    rank: int = 0
    size: int = 1
    group: RankGroup | None = None


WHOLE = Shard()
"""The shard of a model on a single rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How and where a model stores its weights.

    Attributes:
        dtype: of weights and activations. A linear format may store weights in another dtype.
        format_of: the full name of a linear layer in the checkpoint -> how it stores and multiplies its weights.
        table_format: whether the token embeddings are also the head -> their format; None: they are not quantized.
        mixes_formats: fused layers may have parts in different formats.
        batch_invariant: on a GPU, the result of a row must not depend on the number of rows.
        shard: the shard of this process.
    """

    dtype: torch.dtype
    device: torch.device
    format_of: Callable[[str], LinearFormat]
    table_format: Callable[[bool], CodesFormat | None] = lambda is_head: None
    mixes_formats: bool = False
    batch_invariant: bool = False
    shard: Shard = WHOLE

    def empty(self, *shape: int) -> Tensor:
        """Return an uninitialized tensor [*shape]."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Slice(NamedTuple):
    """The part of a checkpoint tensor that a rank loads: ``ranges`` (start, stop) of dimension ``dim``, ascending.

    ``total``: the size of the dimension in the checkpoint.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]
    total: int


class Target(NamedTuple):
    """A tensor to load into, often a view of a fused tensor.

    Attributes:
        source: the part of the checkpoint tensor to load. ``tensor`` has its joined ranges. None for all of it.
        writer: receives the loaded rows instead of ``tensor``, which is its placeholder.
        is_optional: the checkpoint may not have the tensor.
        is_preset: the tensor has a valid value before loading, which dummy weights keep.
        check: raises ValueError if loading could not be finished with the values [...] of the whole checkpoint tensor.
            None: it can be finished with any values.
    """

    tensor: Tensor
    source: Slice | None = None
    writer: RowWriter | None = None
    is_optional: bool = False
    is_preset: bool = False
    check: Callable[[Tensor], object] | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes in memory after loading."""
        return self.tensor.nbytes if self.writer is None else self.writer.num_bytes

    def write(self, values: Tensor) -> None:
        """Load the values [...] of ``source``, all at once."""
        if self.writer is None:
            self.tensor.copy_(values)
        else:
            self.writer.write(0, values)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint tensor."""
        shape = list(self.tensor.shape)
        if self.source is not None:
            shape[self.source.dim] = self.source.total
        return tuple(shape)

    @property
    def index(self) -> tuple[slice | Tensor, ...]:
        """The index of ``source`` in the checkpoint tensor; () for all of it; a tensor [N] for several ranges."""
        if self.source is None:
            return ()
        dim, ranges, _ = self.source
        joined = slice(*ranges[0]) if len(ranges) == 1 else torch.cat([torch.arange(*pair) for pair in ranges])
        return (*[slice(None)] * dim, joined)


class Units(NamedTuple):
    """``count`` consecutive units of ``size`` entries, such as heads, of an axis that is divided among ranks.

    ``may_be_uneven``: the last ranks may have fewer units than the others.
    """

    count: int
    size: int = 1
    may_be_uneven: bool = False


@contextmanager
def errors_of(name: str) -> Generator[None]:
    """Put the name of a layer before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def rank_ranges(units: Sequence[Units], shard: Shard) -> list[tuple[int, int]]:
    """Return the range of entries (start, stop) that a rank has of each group of units on an axis.

    If there are fewer units than ranks, for example KV heads, several ranks have the same unit.

    Raises:
        ValueError: the units of a group cannot be divided evenly among the ranks.
    """
    ranges: list[tuple[int, int]] = []
    start = 0
    for count, size, may_be_uneven in units:
        if may_be_uneven:
            share = -(-count // shard.size)
            first, stop = (min(rank * share, count) for rank in (shard.rank, shard.rank + 1))
        elif max(count, shard.size) % min(count, shard.size):
            raise ValueError(f"{count} units (heads or entries) cannot be divided evenly among {shard.size} ranks")
        else:
            first = shard.rank * count // shard.size
            stop = first + max(count // shard.size, 1)
        ranges.append((start + first * size, start + stop * size))
        start += count * size
    return ranges
