"""Idefics3 and SmolVLM: an image is split into tiles of one size, and then added once more without a split."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.media.tokens._base import Expansion, ImageFamily, ImageShape, placeholder_of, size_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

_AROUND = "<fake_token_around_image>"
_WHOLE = "<global-img>"


class TiledImages(ImageFamily, frozen=True):
    """``scale_factor``: side of the square of patches that become one token."""

    patch_size: int
    scale_factor: int

    placeholder = "<image>"
    options = (("return_row_col_info", True),)

    @classmethod
    def read(cls, config: Mapping[str, object]) -> Self:
        return cls(
            placeholder_id=placeholder_of(config, 128_257),
            patch_size=size_of(config, "patch_size", 32, section="vision_config"),
            scale_factor=size_of(config, "scale_factor", 2),
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
