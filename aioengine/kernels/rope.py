"""Rotary embedding (half-split pairing): x [T, H, E], tables [T, 1, E] -> [T, H, E]."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, E], cos and sin [T, 1, E] -> [T, H, E], computed in fp32. The first half of ``sin`` is negated."""
    wide = x.float()
    half = x.shape[-1] // 2
    swapped = torch.cat((wide[..., half:], wide[..., :half]), dim=-1)
    return (wide * cos).addcmul_(swapped, sin).to(x.dtype)


rope = reference
