"""The destination of keys and values, and the numbers in the KV pool, if it has another dtype than the model.

int8: each head of a token has its own scale, a bf16 number after the E codes of the head. The scale is the largest
magnitude divided by 127, so a code is at most half a scale away from its number.

fp8 (e4m3): a layer may have a scale for keys and one for values. Numbers above the maximum of the format become the
maximum.

T tokens, H query heads, K kv heads, E head size, N pages, S page size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from aioengine.kernels.codes import FP8, FP8_MAX, MAX_INT8
from aioengine.settings.memory_model import INT8_SCALE_BYTES

WriteKV = Callable[[Tensor, Tensor], None]
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


_MIN_SCALE: Final = 1e-30
"""Avoids a division by zero. Smaller numbers become 0."""


def to_stored(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """Convert x [..., E] to numbers of the pool: [..., E], or int8 [..., E + 2].

    NaN and inf become NaN in fp8, and a head with one of them becomes NaN in int8. So the row fails as in 16 bits.

    scale: of fp8 numbers; None: 1.
    """
    if dtype == FP8:
        wide = x.float() if scale is None else x.float() / scale
        return wide.where(wide.isfinite(), torch.nan).clamp_(-FP8_MAX, FP8_MAX).to(dtype)
    if dtype != torch.int8:
        return x if x.dtype == dtype else x.to(dtype)
    wide = x.float()
    scales = (wide.abs().amax(-1, keepdim=True) / MAX_INT8).clamp_(min=_MIN_SCALE).to(torch.bfloat16)
    codes = (wide / scales).round_().clamp_(-MAX_INT8, MAX_INT8).to(torch.int8)
    return torch.cat((codes, scales.view(torch.int8)), dim=-1)


def from_stored(stored: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """Convert numbers of the pool to [..., E] of ``dtype``. The last axis of ``stored`` is contiguous.

    scale: of fp8 numbers; None: 1.
    """
    if stored.dtype == FP8 and scale is not None:
        return stored.float().mul_(scale).to(dtype)
    if stored.dtype != torch.int8:
        return stored if stored.dtype == dtype else stored.to(dtype)
    return stored[..., :-INT8_SCALE_BYTES].to(dtype).mul_(scales_of(stored))


def scales_of(stored: Tensor) -> Tensor:
    """Return a view of the scales [..., 1] of int8 numbers [..., E + 2]."""
    return stored[..., -INT8_SCALE_BYTES:].view(torch.bfloat16)
