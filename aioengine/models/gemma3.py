"""Gemma 3 with images, whose tokens attend to all of their image."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from aioengine.models._image_decoder import ImageDecoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from aioengine.models._base import ModelOptions


class Gemma3(ImageDecoder):
    """Every image is resized to one size, and its tokens attend to each other in both directions."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(config, options)
        self.attention_shape = replace(self.attention_shape, has_bidirectional_images=True)

    def encode_image(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """See ``VisionModel``: [N, D]. ``num_crops`` is 0: pictures are not cut."""
        return super().encode_image({name: array for name, array in arrays.items() if name != "num_crops"})


PLUGIN = Gemma3
