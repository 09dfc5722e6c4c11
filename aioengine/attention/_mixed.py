"""Attention of models whose layers have different windows: the layers of each window have backends of their own.

So a backend plans for one window and one page table, and models with one window for all layers pay nothing for the
others.
T packed tokens, H query heads, K kv heads, E head size, L layers of a part, N pages of the pool, S page size.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Generic, TypeVar

from aioengine.attention._base import (
    AttentionBackend,
    CapturableAttention,
    FixedDecode,
    StepAttention,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from aioengine.attention._base import AttentionShape, DecodeBuffers, ForwardBatch, WriteKV
    from aioengine.kernels.rotate_and_write import KVTarget

    Ints = npt.NDArray[np.int32]


Part = TypeVar("Part", bound=StepAttention)
Groups = tuple[tuple[int, ...], ...]


class _Layers(Generic[Part]):
    """Implements ``StepAttention`` over the parts for ``groups`` of layers."""

    def __init__(self, parts: Sequence[Part], groups: Groups) -> None:
        self.parts = parts
        self.groups = groups
        self._places = {
            layer: (part, index)
            for part, layers in zip(parts, groups, strict=True)
            for index, layer in enumerate(layers)
        }

    def place(self, layer: int) -> tuple[Part, int]:
        """The part of a layer, and the layer's index among those of the part."""
        return self._places[layer]

    def target(self, layer: int) -> KVTarget | WriteKV:
        part, index = self._places[layer]
        return part.target(index)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [T, H, E], k and v [T, K, E] -> [T, H * E]."""
        part, index = self._places[layer]
        return part.attend(q, k, v, index)


class MixedAttention(_Layers[AttentionBackend]):
    """Implements ``AttentionBackend``."""

    def prepare(self, batch: ForwardBatch) -> None:
        for part, its_batch in zip(self.parts, batch.parts or repeat(batch), strict=False):
            part.prepare(its_batch)


class MixedGPUAttention(_Layers[CapturableAttention]):
    """Implements ``CapturableAttention``."""

    def prepare(self, batch: ForwardBatch) -> None:
        for part, its_batch in zip(self.parts, batch.parts or repeat(batch), strict=False):
            part.prepare(its_batch)

    def attend_into(self, q: Tensor, k: Tensor, v: Tensor, layer: int, *, out: Tensor) -> None:
        """q [T, H, E], k and v [T, K, E] -> out [T, H, E]."""
        part, index = self.place(layer)
        part.attend_into(q, k, v, index, out=out)

    def warm_up(self) -> None:
        for part in self.parts:
            part.warm_up()

    def fixed_decode(self, num_rows: int, buffers: DecodeBuffers) -> MixedDecode:
        """Decode steps of ``num_rows`` rows."""
        each = zip(self.parts, buffers.parts or repeat(buffers), strict=False)
        return MixedDecode([part.fixed_decode(num_rows, its_buffers) for part, its_buffers in each], self.groups)


class MixedDecode(_Layers[FixedDecode]):
    """Implements ``FixedDecode``."""

    def plan_first(self, kv_lengths: Ints) -> None:
        """Before the capture, for rows of ``kv_lengths`` [R] positions."""
        for part in self.parts:
            part.plan_first(kv_lengths)

    def plan(self, starts: Tensor, last_lengths: Tensor) -> None:
        """Before each replay, with host copies of the buffers ``starts`` [R + 1] and ``last_lengths`` [R]."""
        for part in self.parts:
            part.plan(starts, last_lengths)


def build(
    plugin: Callable[[AttentionShape, Tensor], AttentionBackend], shape: AttentionShape, kv_pools: Sequence[Tensor]
) -> AttentionBackend:
    """The backend over the pools [L, 1 or 2, N, K, S, E] of the groups of layers (``AttentionShape.groups``)."""
    groups = shape.groups
    parts = [plugin(shape.part(layers), kv_pool) for layers, kv_pool in zip(groups, kv_pools, strict=True)]
    if len(parts) == 1:
        return parts[0]
    on_gpu = [part for part in parts if isinstance(part, CapturableAttention)]
    return MixedGPUAttention(on_gpu, groups) if len(on_gpu) == len(parts) else MixedAttention(parts, groups)
