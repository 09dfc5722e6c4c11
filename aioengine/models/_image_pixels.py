"""Resizes images on the device, and converts bytes to values.

The results have the same bits as the image processors of transformers, which use Pillow.

Shape letters: C channels, h and w input size, H and W output size, K and L taps of a resize pass, N output rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aioengine.protocol.media import RESIZE_BITS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def looked_up(pixels: Tensor, table: Tensor) -> Tensor:
    """Look up bytes [..., C, H, W] in the table [C, 256]: -> values [..., C, H, W]."""
    channels = pixels.view(-1, len(table), pixels.shape[-2] * pixels.shape[-1])
    return table.expand(len(channels), -1, -1).gather(2, channels.long()).view(pixels.shape)


def resized(arrays: Mapping[str, Tensor], *, rows_first: bool) -> Tensor:
    """Resize ``picture`` [h, w, 3] -> [3, H, W].

    The passes are in ``row_starts`` [H], ``row_weights`` [H, K], ``column_starts`` [W] and ``column_weights`` [W, L].
    """
    pixels = arrays["picture"].permute(2, 0, 1)
    for name, dim in (("row", 1), ("column", 2)) if rows_first else (("column", 2), ("row", 1)):
        pixels = _summed(pixels, arrays[f"{name}_starts"], arrays[f"{name}_weights"], dim)
    return pixels.contiguous()


def _summed(pixels: Tensor, starts: Tensor, weights: Tensor, dim: int) -> Tensor:
    """Run one pass along ``dim`` of [C, h, w]: sums of K neighbours from ``starts`` [N], with ``weights`` [N, K]."""
    shape = [*pixels.shape[:dim], len(starts), *pixels.shape[dim + 1 :]]
    total = starts.new_full(shape, 1 << (RESIZE_BITS - 1))  # for rounding
    offsets = torch.arange(weights.shape[1], device=starts.device, dtype=starts.dtype)
    indices = (starts + offsets.unsqueeze(1)).clamp_(max=pixels.shape[dim] - 1)
    column = (-1, 1) if dim == 1 else (-1,)
    for part, weight in zip(indices, weights.unbind(1), strict=True):
        total += pixels.index_select(dim, part).int().mul_(weight.view(column))
    return total.bitwise_right_shift_(RESIZE_BITS).clamp_(0, 255).byte()
