"""Idefics3 and SmolVLM: an image is split into tiles of one size, and then added once more without a split."""

from __future__ import annotations

from msgspec import Struct

from aioengine.media.tokens._base import Expansion, ImageFamily, ImageShape, Size

_AROUND = "<fake_token_around_image>"
_WHOLE = "<global-img>"


class _TileTower(Struct, frozen=True):
    patch_size: Size = 32


class TiledImages(ImageFamily, frozen=True, kw_only=True):
    """``scale_factor``: side of the square of patches that become one token."""

    vision_config: _TileTower = _TileTower()
    scale_factor: Size = 2

    default_id = 128_257
    placeholder = "<image>"
    options = (("return_row_col_info", True),)

    def expansion(self, image: ImageShape) -> Expansion:
        rows, columns = image.tiles
        texts: list[str] = []
        for row in range(1, rows + 1):
            texts += [f"{_AROUND}<row_{row}_col_{column}>" for column in range(1, columns + 1)]
            if row > 1:
                texts[-columns] = "\n" + texts[-columns]
        texts.append(("\n\n" if texts else "") + _AROUND + _WHOLE)
        size = self.vision_config.patch_size
        num_patches = (image.height // size) * (image.width // size)
        return Expansion((*texts, _AROUND), num_patches // self.scale_factor**2)


class Idefics3Images(TiledImages, frozen=True, kw_only=True):
    processor = "Idefics3ImageProcessor"


class SmolVlmImages(TiledImages, frozen=True, kw_only=True):
    processor = "SmolVLMImageProcessor"
