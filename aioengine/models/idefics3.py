"""Idefics3 and SmolVLM: an image is split into tiles of one size, and added once more as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from aioengine.models._image_decoder import ImageDecoder

if TYPE_CHECKING:
    from torch import Tensor

MAX_TILES: Final = 64
"""Tiles of the largest image, for the memory measurement. Known processors create up to 26."""


class Idefics3(ImageDecoder):
    """Idefics3. Each tile has the same number of tokens."""

    def largest_image(self, max_tokens: int) -> dict[str, Tensor]:
        """Return pixels [1, tiles, 3, side, side] and their mask [1, tiles, side, side], see ``VisionModel``.

        The values are ones, since transformers drops tiles of zeros.
        """
        config = self._tower.config
        side = int(config.vision_config.image_size)
        num_tokens = (side // int(config.vision_config.patch_size)) ** 2 // int(config.scale_factor) ** 2
        num_tiles = min(max(max_tokens // max(num_tokens, 1), 1), MAX_TILES)
        return {
            "pixels": torch.zeros(1, num_tiles, 3, side, side, dtype=torch.uint8),
            "table": torch.ones(3, 256),
            "pixel_attention_mask": torch.ones(1, num_tiles, side, side, dtype=torch.int64),
        }


PLUGIN = Idefics3
