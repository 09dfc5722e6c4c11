"""Qwen's models: images keep their aspect ratio, and ``merge_size`` x ``merge_size`` patches become one token.

Prompts contain ``<|vision_start|><|image_pad|><|vision_end|>``. The middle token is the placeholder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.media.tokens._base import Expansion, ImageFamily, ImageShape, placeholder_of, size_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self


class QwenImages(ImageFamily, frozen=True):
    """``merge_size``: side of the square of patches that become one token."""

    merge_size: int

    placeholder = "<|vision_start|><|image_pad|><|vision_end|>"
    processor = "Qwen2VLImageProcessor"

    @classmethod
    def read(cls, config: Mapping[str, object]) -> Self:
        merge_size = size_of(config, "spatial_merge_size", 2, section="vision_config")
        return cls(placeholder_id=placeholder_of(config, 151_655), merge_size=merge_size)

    def expansion(self, image: ImageShape) -> Expansion:
        frames, height, width = image.grid
        return Expansion(("", ""), frames * height * width // self.merge_size**2)
