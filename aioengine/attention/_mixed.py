"""Attention of models whose layers have different windows: one backend for each group of layers with the same window.

So a backend has one window and one page table, and models with one window have no overhead.
T packed tokens, H query heads, K kv heads, E head size, L layers of a group, N pages of the pool, S page size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from aioengine.attention._base import (
    AttentionBackend,
    AttentionShape,
    CapturableAttention,
    DecodeBuffers,
    FixedDecode,
    ForwardBatch,
    StepAttention,
)
from aioengine.kernels.arrays import Ints32
from aioengine.kernels.kv_target import KVTarget, WriteKV

Attention = TypeVar("Attention", bound=StepAttention)
Groups = tuple[tuple[int, ...], ...]


class _ByLayer(Generic[Attention]):
    """Implements ``StepAttention``: calls the backend of each layer's group."""

    def __init__(self, backends: Sequence[Attention], groups: Groups) -> None:
        self.backends = backends
        self.groups = groups
        self._backend_of_layer = {
            layer: (backend, index)
            for backend, layers in zip(backends, groups, strict=True)
            for index, layer in enumerate(layers)
        }

    def target(self, layer: int) -> KVTarget | WriteKV:
        backend, index = self._backend_of_layer[layer]
        return backend.target(index)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """q [T, H, E], k and v [T, K, E] -> [T, H * E]."""
        backend, index = self._backend_of_layer[layer]
        return backend.attend(q, k, v, index)


Backend = TypeVar("Backend", bound=AttentionBackend)


class MixedAttention(_ByLayer[Backend]):
    """Implements ``AttentionBackend``."""

    def prepare(self, batch: ForwardBatch) -> None:
        batches = batch.parts or [batch] * len(self.backends)
        for backend, group_batch in zip(self.backends, batches, strict=True):
            backend.prepare(group_batch)


class MixedCapturableAttention(MixedAttention[CapturableAttention]):
    """Implements ``CapturableAttention``."""

    def bind(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> Callable[[int], None]:
        """Return a function of the layer: q [T, H, E], k and v [T, K, E] -> out [T, H, E]."""
        bound = {backend: backend.bind(q, k, v, out=out) for backend in self.backends}

        def attend(layer: int) -> None:
            backend, index = self._backend_of_layer[layer]
            bound[backend](index)

        return attend

    def warm_up(self) -> None:
        for backend in self.backends:
            backend.warm_up()

    def fixed_decode(self, num_rows: int, buffers: DecodeBuffers) -> MixedDecode:
        """Return attention for decode steps of ``num_rows`` rows."""
        all_buffers = buffers.parts or [buffers] * len(self.backends)
        pairs = zip(self.backends, all_buffers, strict=True)
        return MixedDecode([backend.fixed_decode(num_rows, own) for backend, own in pairs], self.groups)


class MixedDecode(_ByLayer[FixedDecode]):
    """Implements ``FixedDecode``."""

    max_row_tokens = 1

    def plan(self, starts: Ints32, last_lengths: Ints32, tables: Ints32 | None = None) -> None:
        """Plan a step, from host copies of the buffers ``starts`` [R + 1] and ``last_lengths`` [R]."""
        for backend in self.backends:
            backend.plan(starts, last_lengths)


def build(
    make_backend: Callable[[AttentionShape, Tensor], AttentionBackend],
    shape: AttentionShape,
    kv_pools: Sequence[Tensor],
) -> AttentionBackend:
    """Build the backend for the pools [L, 1 or 2, N, K, S, E] of ``shape.groups``."""
    groups = shape.groups
    backends = [make_backend(shape.part(layers), kv_pool) for layers, kv_pool in zip(groups, kv_pools, strict=True)]
    if len(backends) == 1:
        return backends[0]
    capturable = [backend for backend in backends if isinstance(backend, CapturableAttention)]
    if len(capturable) == len(backends):
        return MixedCapturableAttention(capturable, groups)
    return MixedAttention(backends, groups)
