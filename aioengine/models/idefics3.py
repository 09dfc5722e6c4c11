"""Idefics3 and SmolVLM: an image is cut into tiles of one size, and is seen once more as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from aioengine.models._image_decoder import ImageDecoder

if TYPE_CHECKING:
    from torch import Tensor

MOST_TILES: Final = 64
"""Of an image, for the measurement of memory: known processors make up to 26."""


class Idefics3(ImageDecoder):
    """Each tile has as many tokens."""

    def largest_image(self, max_tokens: int) -> dict[str, Tensor]:
        """See ``VisionModel``: pixels [1, tiles, 3, side, side], and whether they count [1, tiles, side, side].

        All values are ones, for tiles of zeros are left out.
        """
        config = self._tower.config
        side = int(config.vision_config.image_size)
        num_tokens = (side // int(config.vision_config.patch_size)) ** 2 // int(config.scale_factor) ** 2
        num_tiles = min(max(max_tokens // max(num_tokens, 1), 1), MOST_TILES)
        return {
            "pixels": torch.zeros(1, num_tiles, 3, side, side, dtype=torch.uint8),
            "table": torch.ones(3, 256),
            "pixel_attention_mask": torch.ones(1, num_tiles, side, side, dtype=torch.int64),
        }


PLUGIN = Idefics3
