"""Gemma 3: all images have one size and 256 tokens, without "pan and scan", which is the default of transformers.

Prompts contain ``<start_of_image>``. Line breaks and the tokens around an image are added before tokenization, because
adjacent line breaks merge into one token. ``<image_soft_token>`` is the placeholder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.media.tokens._base import Expansion, ImageFamily, ImageShape, placeholder_of, size_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

_START = "<start_of_image>"
_TOKEN = "<image_soft_token>"


class Gemma3Images(ImageFamily, frozen=True):
    """``num_tokens``: tokens per image."""

    num_tokens: int

    placeholder = _START
    processor = "Gemma3ImageProcessor"
    options = (("do_pan_and_scan", False),)

    @classmethod
    def read(cls, config: Mapping[str, object]) -> Self:
        num_tokens = size_of(config, "mm_tokens_per_image", 256)
        return cls(placeholder_id=placeholder_of(config, 262_144), num_tokens=num_tokens)

    def in_text(self, text: str) -> str:
        has_all = _TOKEN in text  # the caller wrote the expanded form
        return text if has_all else text.replace(_START, f"\n\n{_START}{_TOKEN}<end_of_image>\n\n")

    def expansion(self, image: ImageShape) -> Expansion:
        return Expansion(("", ""), self.num_tokens)


PLUGIN = Gemma3Images
