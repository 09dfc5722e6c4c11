"""Attention of models with different windows per layer: layers with the same window have their own backend.

So a backend has one window and one page table, and models with one window have no overhead.
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

    from torch import Tensor

    from aioengine.attention._base import AttentionShape, DecodeBuffers, ForwardBatch, Ints
    from aioengine.kernels.kv_target import KVTarget, WriteKV


Part = TypeVar("Part", bound=StepAttention)
Groups = tuple[tuple[int, ...], ...]


class _Layers(Generic[Part]):
    """Implements ``StepAttention``: calls the part of each layer's group."""

    def __init__(self, parts: Sequence[Part], groups: Groups) -> None:
        self.parts = parts
        self.groups = groups
        self._part_of_layer = {
            layer: (part, index)
            for part, layers in zip(parts, groups, strict=True)
            for index, layer in enumerate(layers)
        }

    def target(self, layer: int) -> KVTarget | WriteKV:
        part, index = self._part_of_layer[layer]
        return part.target(index)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [T, H, E], k and v [T, K, E] -> [T, H * E]."""
        part, index = self._part_of_layer[layer]
        return part.attend(q, k, v, index)


Backend = TypeVar("Backend", bound=AttentionBackend)


class MixedAttention(_Layers[Backend]):
    """Implements ``AttentionBackend``."""

    def prepare(self, batch: ForwardBatch) -> None:
        for part, part_batch in zip(self.parts, batch.parts or repeat(batch), strict=False):
            part.prepare(part_batch)


class MixedGPUAttention(MixedAttention[CapturableAttention]):
    """Implements ``CapturableAttention``."""

    def attend_into(self, q: Tensor, k: Tensor, v: Tensor, layer: int, *, out: Tensor) -> None:
        """q [T, H, E], k and v [T, K, E] -> out [T, H, E]."""
        part, index = self._part_of_layer[layer]
        part.attend_into(q, k, v, index, out=out)

    def warm_up(self) -> None:
        for part in self.parts:
            part.warm_up()

    def fixed_decode(self, num_rows: int, buffers: DecodeBuffers) -> MixedDecode:
        """Return attention for decode steps of ``num_rows`` rows."""
        pairs = zip(self.parts, buffers.parts or repeat(buffers), strict=False)
        return MixedDecode([part.fixed_decode(num_rows, part_buffers) for part, part_buffers in pairs], self.groups)


class MixedDecode(_Layers[FixedDecode]):
    """Implements ``FixedDecode``."""

    def plan_capture(self, kv_lengths: Ints) -> None:
        """Plan the capture, for rows of ``kv_lengths`` [R] positions."""
        for part in self.parts:
            part.plan_capture(kv_lengths)

    def plan(self, starts: Tensor, last_lengths: Tensor) -> None:
        """Plan a replay, from host copies of the buffers ``starts`` [R + 1] and ``last_lengths`` [R]."""
        for part in self.parts:
            part.plan(starts, last_lengths)


def build(
    plugin: Callable[[AttentionShape, Tensor], AttentionBackend], shape: AttentionShape, kv_pools: Sequence[Tensor]
) -> AttentionBackend:
    """Build the backend for the pools [L, 1 or 2, N, K, S, E] of ``shape.groups``."""
    groups = shape.groups
    parts = [plugin(shape.part(layers), kv_pool) for layers, kv_pool in zip(groups, kv_pools, strict=True)]
    if len(parts) == 1:
        return parts[0]
    on_gpu = [part for part in parts if isinstance(part, CapturableAttention)]
    return MixedGPUAttention(on_gpu, groups) if len(on_gpu) == len(parts) else MixedAttention(parts, groups)
