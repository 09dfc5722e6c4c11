"""How prompts of each model contain images. Torch-free."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from aioengine.media.tokens._base import Expansion, ImageFamily, ImageShape, Size

_CLIP = "clip_vision_model"


class _ClipTower(Struct, frozen=True):
    model_type: Literal["clip_vision_model", "siglip_vision_model"] = _CLIP
    patch_size: Size = 14


class LlavaImages(ImageFamily, frozen=True, kw_only=True):
    """LLaVA 1.5: images of one size, with one token per patch (576 patches of 14 x 14 pixels at 336 x 336).

    ``vision_feature_select_strategy``: "default" drops the feature of the class token, which only CLIP has.
    """

    vision_config: _ClipTower = _ClipTower()
    vision_feature_select_strategy: Literal["default", "full"] = "default"

    placeholder = "<image>"
    processor = "LlavaImageProcessor"

    def expansion(self, image: ImageShape) -> Expansion:
        tower = self.vision_config
        num_patches = (image.height // tower.patch_size) * (image.width // tower.patch_size)
        num_extra = (tower.model_type == _CLIP) - (self.vision_feature_select_strategy == "default")
        return Expansion(("", ""), num_patches + num_extra)


_START = "<start_of_image>"
_TOKEN = "<image_soft_token>"


class Gemma3Images(ImageFamily, frozen=True, kw_only=True):
    """Gemma 3: all images have one size and 256 tokens, without "pan and scan", which is the default of transformers.

    Prompts contain ``<start_of_image>``. Line breaks and the tokens around an image are added before tokenization,
    because adjacent line breaks merge into one token. ``<image_soft_token>`` is the placeholder.
    """

    mm_tokens_per_image: Size = 256

    placeholder = _START
    processor = "Gemma3ImageProcessor"
    options = (("do_pan_and_scan", False),)

    def in_text(self, text: str) -> str:
        has_all = _TOKEN in text  # the caller wrote the expanded form
        return text if has_all else text.replace(_START, f"\n\n{_START}{_TOKEN}<end_of_image>\n\n")

    def expansion(self, image: ImageShape) -> Expansion:
        return Expansion(("", ""), self.mm_tokens_per_image)


class _QwenTower(Struct, frozen=True):
    spatial_merge_size: Size = 2


class QwenImages(ImageFamily, frozen=True, kw_only=True):
    """Qwen: images keep their aspect ratio, and a square of ``spatial_merge_size`` patches a side becomes one token."""

    vision_config: _QwenTower = _QwenTower()

    placeholder = "<|vision_start|><|image_pad|><|vision_end|>"
    processor = "Qwen2VLImageProcessor"

    def expansion(self, image: ImageShape) -> Expansion:
        frames, height, width = image.grid
        return Expansion(("", ""), frames * height * width // self.vision_config.spatial_merge_size**2)


_AROUND = "<fake_token_around_image>"
_WHOLE = "<global-img>"


class _TileTower(Struct, frozen=True):
    patch_size: Size = 32


class Idefics3Images(ImageFamily, frozen=True, kw_only=True):
    """Idefics3: an image is split into tiles of one size, and then added once more without a split.

    ``scale_factor``: side of the square of patches that become one token.
    """

    vision_config: _TileTower = _TileTower()
    scale_factor: Size = 2

    placeholder = "<image>"
    processor = "Idefics3ImageProcessor"
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


class SmolVlmImages(Idefics3Images, frozen=True, kw_only=True):
    processor = "SmolVLMImageProcessor"
