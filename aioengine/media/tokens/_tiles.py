"""Idefics3 and SmolVLM: an image is split into tiles of one size, and then added once more without a split."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from aioengine.media.tokens._base import Expansion, ImageFamily, ImageShape, decoded, size_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

_AROUND = "<fake_token_around_image>"
_WHOLE = "<global-img>"


class _TiledVisionFields(Struct, frozen=True):
    patch_size: int = 32


class _TiledFields(Struct, frozen=True):
    image_token_id: int = 128_257
    scale_factor: int = 2
    vision_config: _TiledVisionFields = _TiledVisionFields()


class TiledImages(ImageFamily, frozen=True):
    """``scale_factor``: side of the square of patches that become one token."""

    patch_size: int
    scale_factor: int

    placeholder = "<image>"
    options = (("return_row_col_info", True),)

    @classmethod
    def read(cls, config: Mapping[str, object]) -> Self:
        fields = decoded(config, _TiledFields)
        return cls(
            placeholder_id=fields.image_token_id,
            patch_size=size_of("vision_config.patch_size", fields.vision_config.patch_size),
            scale_factor=size_of("scale_factor", fields.scale_factor),
        )

    def expansion(self, image: ImageShape) -> Expansion:
        rows, columns = image.tiles
        texts: list[str] = []
        for row in range(1, rows + 1):
            texts += [f"{_AROUND}<row_{row}_col_{column}>" for column in range(1, columns + 1)]
            if row > 1:
                texts[-columns] = "\n" + texts[-columns]
        texts.append(("\n\n" if texts else "") + _AROUND + _WHOLE)
        num_patches = (image.height // self.patch_size) * (image.width // self.patch_size)
        return Expansion((*texts, _AROUND), num_patches // self.scale_factor**2)


class Idefics3Images(TiledImages, frozen=True):
    processor = "Idefics3ImageProcessor"


class SmolVlmImages(TiledImages, frozen=True):
    processor = "SmolVLMImageProcessor"
