"""LLaVA 1.5: images of one size, with one token per patch (576 patches of 14 x 14 pixels at 336 x 336)."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from aioengine.media.tokens._base import Expansion, ImageFamily, ImageShape, Size

_CLIP = "clip_vision_model"


class _ClipTower(Struct, frozen=True):
    model_type: Literal["clip_vision_model", "siglip_vision_model"] = _CLIP
    patch_size: Size = 14


class LlavaImages(ImageFamily, frozen=True, kw_only=True):
    """``vision_feature_select_strategy``: "default" drops the feature of the class token, which only CLIP has."""

    vision_config: _ClipTower = _ClipTower()
    vision_feature_select_strategy: Literal["default", "full"] = "default"

    placeholder = "<image>"
    processor = "LlavaImageProcessor"

    def expansion(self, image: ImageShape) -> Expansion:
        tower = self.vision_config
        num_patches = (image.height // tower.patch_size) * (image.width // tower.patch_size)
        num_extra = (tower.model_type == _CLIP) - (self.vision_feature_select_strategy == "default")
        return Expansion(("", ""), num_patches + num_extra)


PLUGIN = LlavaImages
