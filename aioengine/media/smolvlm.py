"""SmolVLM: tiles as in Idefics3."""

from __future__ import annotations

from aioengine.media._tiles import TiledImages


class SmolVlmImages(TiledImages, frozen=True):
    processor = "SmolVLMImageProcessor"


PLUGIN = SmolVlmImages
