"""The numbers of keys and values in the KV pool, if it has another dtype than the model.

int8: each head of a token has its own scale, a bf16 number after the E codes of the head. The scale is the largest
magnitude divided by 127, so a code is at most half a scale away from its number.

N heads of tokens, E head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from aioengine.settings.memory_model import INT8_SCALE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST: Final = 127
_MIN_SCALE: Final = 1e-30
"""Avoids a division by zero. Smaller numbers become 0."""


def to_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert x [..., E] to numbers of the pool: [..., E], or int8 [..., E + 2]. Heads with NaN or inf become NaN."""
    if dtype != torch.int8:
        return x.to(dtype)
    wide = x.float()
    scales = (wide.abs().amax(-1, keepdim=True) / _LARGEST).clamp_(min=_MIN_SCALE).to(torch.bfloat16)
    codes = (wide / scales).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    return torch.cat((codes, scales.view(torch.int8)), dim=-1)


def from_stored(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert numbers of the pool to [..., E] of ``dtype``. The last axis of ``stored`` is contiguous."""
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    return stored[..., :-INT8_SCALE_BYTES].to(dtype).mul_(scales_of(stored))


def scales_of(stored: Tensor) -> Tensor:
    """Return a view of the scales [..., 1] of int8 numbers [..., E + 2]."""
    return stored[..., -INT8_SCALE_BYTES:].view(torch.bfloat16)
