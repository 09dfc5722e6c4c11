"""LLaVA 1.5: images of one size, with one token per patch (576 patches of 14 x 14 pixels at 336 x 336)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.media.tokens._base import Expansion, ImageFamily, ImageShape, placeholder_of, section_of, size_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

_TOWERS_WITH_CLASS_TOKEN = ("clip_vision_model",)
_TOWERS = (*_TOWERS_WITH_CLASS_TOKEN, "siglip_vision_model")


_STRATEGIES = ("default", "full")


class LlavaImages(ImageFamily, frozen=True):
    """``num_extra``: features in addition to the features of patches: 1 if the class token is kept."""

    patch_size: int
    num_extra: int

    placeholder = "<image>"
    processor = "LlavaImageProcessor"

    @classmethod
    def read(cls, config: Mapping[str, object]) -> Self:
        tower = section_of(config, "vision_config").get("model_type", _TOWERS[0])
        strategy = config.get("vision_feature_select_strategy", _STRATEGIES[0])
        if tower not in _TOWERS:
            raise ValueError(f"config.json: vision_config.model_type {tower!r} is none of {', '.join(_TOWERS)}")
        if strategy not in _STRATEGIES:
            raise ValueError(
                f"config.json: vision_feature_select_strategy {strategy!r} is none of {', '.join(_STRATEGIES)}"
            )
        return cls(
            placeholder_id=placeholder_of(config),
            patch_size=size_of(config, "patch_size", 14, section="vision_config"),
            num_extra=(tower in _TOWERS_WITH_CLASS_TOKEN) - (strategy == "default"),
        )

    def expansion(self, image: ImageShape) -> Expansion:
        num_patches = (image.height // self.patch_size) * (image.width // self.patch_size)
        return Expansion(("", ""), num_patches + self.num_extra)


PLUGIN = LlavaImages
