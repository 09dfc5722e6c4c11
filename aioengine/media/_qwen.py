"""Qwen's vision models: an image keeps its proportions, and ``merge_size`` x ``merge_size`` patches are one token.

The prompt holds ``<|vision_start|><|image_pad|><|vision_end|>``, of which the middle one stands for the image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from msgspec import Struct

from aioengine.media._base import Expansion, ImageShape, decoded, size_of


class _QwenVisionFields(Struct, frozen=True):
    spatial_merge_size: int = 2


class _QwenFields(Struct, frozen=True):
    image_token_id: int = 151_655
    vision_config: _QwenVisionFields = _QwenVisionFields()


class QwenImages(Struct, frozen=True):
    """``merge_size``: patches, in each direction, whose features become one token."""

    placeholder_id: int
    merge_size: int

    placeholder: ClassVar[str] = "<|vision_start|><|image_pad|><|vision_end|>"
    processor: ClassVar[str] = "Qwen2VLImageProcessor"
    options: ClassVar[Mapping[str, bool]] = {}

    @classmethod
    def read(cls, config: Mapping[str, object]) -> Self:
        found = decoded(config, _QwenFields)
        merge_size = size_of("vision_config.spatial_merge_size", found.vision_config.spatial_merge_size)
        return cls(placeholder_id=found.image_token_id, merge_size=merge_size)

    def in_text(self, text: str) -> str:
        return text

    def expansion(self, image: ImageShape) -> Expansion:
        frames, height, width = image.grid
        return Expansion(("", ""), frames * height * width // self.merge_size**2)
