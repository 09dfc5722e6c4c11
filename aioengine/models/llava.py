"""LLaVA 1.5."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioengine.families import llava
from aioengine.models._image_decoder import ImageDecoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.models._base import ModelOptions


class Llava(ImageDecoder):
    """Every image is resized to one size, and has as many tokens as the tower has patches."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(config, llava.read(config), options)


PLUGIN = Llava
