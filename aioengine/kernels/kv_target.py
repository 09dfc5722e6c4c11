"""The destination of keys and values. T tokens, H query heads, K kv heads, E head size, N pages, S page size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from aioengine.kernels.stored_kv import to_stored

if TYPE_CHECKING:
    from torch import Tensor

WriteKV = Callable[["Tensor", "Tensor"], None]
"""Writes rotated k and v of the step's tokens, [T, K, E] each, to their slots."""


class KVTarget(NamedTuple):
    """The destination of k and v: slots [T] (page id * S + offset) of keys and values [N, K, S, E].

    heads: contiguous [T, H + 2 K, E] that also receives q, k and v; None: no such tensor.
    scales: fp32 [2], of fp8 keys and values; None: 1.
    """

    slots: Tensor
    keys: Tensor
    values: Tensor
    heads: Tensor | None = None
    scales: Tensor | None = None

    def write(self, k: Tensor, v: Tensor) -> None:
        """Write k and v [T, K, E] to their slots, with torch."""
        slots, page_size = self.slots.long(), self.keys.shape[2]
        key_scale, value_scale = (None, None) if self.scales is None else self.scales
        self.keys[slots // page_size, :, slots % page_size] = to_stored(k, self.keys.dtype, key_scale)
        self.values[slots // page_size, :, slots % page_size] = to_stored(v, self.values.dtype, value_scale)
