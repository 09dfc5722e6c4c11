"""LLaVA 1.5: images of one size, with one token per patch (576 patches of 14 x 14 pixels at 336 x 336)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from aioengine.media.tokens._base import Expansion, ImageFamily, ImageShape, decoded, size_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

_TOWERS_WITH_CLASS_TOKEN = ("clip_vision_model",)
_TOWERS = (*_TOWERS_WITH_CLASS_TOKEN, "siglip_vision_model")


class _LlavaVisionFields(Struct, frozen=True):
    model_type: str = "clip_vision_model"
    patch_size: int = 14


class _LlavaFields(Struct, frozen=True):
    image_token_index: int | None = None
    image_token_id: int | None = None
    vision_config: _LlavaVisionFields = _LlavaVisionFields()
    vision_feature_select_strategy: Literal["default", "full"] = "default"


class LlavaImages(ImageFamily, frozen=True):
    """``num_extra``: features in addition to the features of patches: 1 if the class token is kept."""

    patch_size: int
    num_extra: int

    placeholder = "<image>"
    processor = "LlavaImageProcessor"

    @classmethod
    def read(cls, config: Mapping[str, object]) -> Self:
        fields = decoded(config, _LlavaFields)
        tower = fields.vision_config.model_type
        if tower not in _TOWERS:
            raise ValueError(f"config.json: vision_config.model_type {tower!r} is none of {', '.join(_TOWERS)}")
        placeholder_id = fields.image_token_index if fields.image_token_id is None else fields.image_token_id
        if placeholder_id is None:
            raise ValueError("config.json has no image_token_index, the token that stands for an image")
        has_class_token = tower in _TOWERS_WITH_CLASS_TOKEN
        return cls(
            placeholder_id=placeholder_id,
            patch_size=size_of("vision_config.patch_size", fields.vision_config.patch_size),
            num_extra=has_class_token - (fields.vision_feature_select_strategy == "default"),
        )

    def expansion(self, image: ImageShape) -> Expansion:
        num_patches = (image.height // self.patch_size) * (image.width // self.patch_size)
        return Expansion(("", ""), num_patches + self.num_extra)


PLUGIN = LlavaImages
