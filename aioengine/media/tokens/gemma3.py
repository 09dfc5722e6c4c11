"""Gemma 3: all images have one size and 256 tokens, without "pan and scan", which is the default of transformers.

Prompts contain ``<start_of_image>``. Line breaks and the tokens around an image are added before tokenization, because
adjacent line breaks merge into one token. ``<image_soft_token>`` is the placeholder.
"""

from __future__ import annotations

from aioengine.media.tokens._base import Expansion, ImageFamily, ImageShape, Size

_START = "<start_of_image>"
_TOKEN = "<image_soft_token>"


class Gemma3Images(ImageFamily, frozen=True, kw_only=True):
    """``mm_tokens_per_image``: tokens per image."""

    mm_tokens_per_image: Size = 256

    default_id = 262_144
    placeholder = _START
    processor = "Gemma3ImageProcessor"
    options = (("do_pan_and_scan", False),)

    def in_text(self, text: str) -> str:
        has_all = _TOKEN in text  # the caller wrote the expanded form
        return text if has_all else text.replace(_START, f"\n\n{_START}{_TOKEN}<end_of_image>\n\n")

    def expansion(self, image: ImageShape) -> Expansion:
        return Expansion(("", ""), self.mm_tokens_per_image)


PLUGIN = Gemma3Images
