"""Idefics3: a large image is cut into tiles, each with its row and column in front; the whole image follows them."""

from __future__ import annotations

from aioengine.media._tiles import TiledImages


class Idefics3Images(TiledImages, frozen=True):
    processor = "Idefics3ImageProcessor"


PLUGIN = Idefics3Images
