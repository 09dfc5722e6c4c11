"""What is left to do with the bytes of an image on the device: they are resized, and looked up in a table.

Both have the same bits as the image processors of transformers, which work with Pillow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aioengine.protocol.media import RESIZE_BITS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def looked_up(pixels: Tensor, table: Tensor) -> Tensor:
    """Bytes [..., C, H, W] -> the values [..., C, H, W] that stand for them in the table [C, 256]."""
    channels = pixels.view(-1, len(table), pixels.shape[-2] * pixels.shape[-1])
    return table.expand(len(channels), -1, -1).gather(2, channels.long()).view(pixels.shape)


def resized(arrays: Mapping[str, Tensor], *, rows_first: bool) -> Tensor:
    """The ``picture`` [height, width, 3 or 4] -> [3, H, W], by the passes beside it. A fourth byte is no colour.

    They are ``row_starts`` [H], ``row_weights`` [H, K], ``column_starts`` [W] and ``column_weights`` [W, L].
    """
    pixels = arrays["picture"].permute(2, 0, 1)[:3]
    for name, dim in (("row", 1), ("column", 2)) if rows_first else (("column", 2), ("row", 1)):
        pixels = _summed(pixels, arrays[f"{name}_starts"], arrays[f"{name}_weights"], dim)
    return pixels.contiguous()


def _summed(pixels: Tensor, starts: Tensor, weights: Tensor, dim: int) -> Tensor:
    """One pass along ``dim`` of bytes [C, h, w]: sums of K neighbours, from ``starts`` [N] on, by weights [N, K]."""
    shape = [*pixels.shape[:dim], len(starts), *pixels.shape[dim + 1 :]]
    total = starts.new_full(shape, 1 << (RESIZE_BITS - 1))  # rounds
    reach = torch.arange(weights.shape[1], device=starts.device, dtype=starts.dtype)
    places = (starts + reach.unsqueeze(1)).clamp_(max=pixels.shape[dim] - 1)
    column = (-1, 1) if dim == 1 else (-1,)
    for part, weight in zip(places, weights.unbind(1), strict=True):
        total += pixels.index_select(dim, part).int().mul_(weight.view(column))
    return total.bitwise_right_shift_(RESIZE_BITS).clamp_(0, 255).byte()
