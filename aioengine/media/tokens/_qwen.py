"""Qwen's models: images keep their aspect ratio, and ``merge_size`` x ``merge_size`` patches become one token.

Prompts contain ``<|vision_start|><|image_pad|><|vision_end|>``. The middle token is the placeholder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from aioengine.media.tokens._base import Expansion, ImageFamily, ImageShape, decoded, size_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self


class _QwenVisionFields(Struct, frozen=True):
    spatial_merge_size: int = 2


class _QwenFields(Struct, frozen=True):
    image_token_id: int = 151_655
    vision_config: _QwenVisionFields = _QwenVisionFields()


class QwenImages(ImageFamily, frozen=True):
    """``merge_size``: side of the square of patches that become one token."""

    merge_size: int

    placeholder = "<|vision_start|><|image_pad|><|vision_end|>"
    processor = "Qwen2VLImageProcessor"

    @classmethod
    def read(cls, config: Mapping[str, object]) -> Self:
        fields = decoded(config, _QwenFields)
        merge_size = size_of("vision_config.spatial_merge_size", fields.vision_config.spatial_merge_size)
        return cls(placeholder_id=fields.image_token_id, merge_size=merge_size)

    def expansion(self, image: ImageShape) -> Expansion:
        frames, height, width = image.grid
        return Expansion(("", ""), frames * height * width // self.merge_size**2)
