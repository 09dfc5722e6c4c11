"""Qwen's models: images keep their aspect ratio, and ``merge_size`` x ``merge_size`` patches become one token.

Prompts contain ``<|vision_start|><|image_pad|><|vision_end|>``. The middle token is the placeholder.
"""

from __future__ import annotations

from msgspec import Struct

from aioengine.media.tokens._base import Expansion, ImageFamily, ImageShape, Size


class _QwenTower(Struct, frozen=True):
    """``spatial_merge_size``: side of the square of patches that become one token."""

    spatial_merge_size: Size = 2


class QwenImages(ImageFamily, frozen=True, kw_only=True):
    vision_config: _QwenTower = _QwenTower()

    default_id = 151_655
    placeholder = "<|vision_start|><|image_pad|><|vision_end|>"
    processor = "Qwen2VLImageProcessor"

    def expansion(self, image: ImageShape) -> Expansion:
        frames, height, width = image.grid
        return Expansion(("", ""), frames * height * width // self.vision_config.spatial_merge_size**2)
