"""Gemma 3 with images. The tokens of an image attend to each other in both directions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from aioengine.models._image_decoder import ImageDecoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from aioengine.models._base import ModelOptions


class Gemma3(ImageDecoder):
    """Gemma 3. All images have one size."""

    def __init__(self, config: Mapping[str, object], options: ModelOptions) -> None:
        super().__init__(config, options)
        self.attention_shape = replace(self.attention_shape, has_bidirectional_images=True)

    def encode_image(self, arrays: Mapping[str, Tensor]) -> Tensor:
        """Return [N, D], see ``VisionModel``. ``num_crops`` is dropped: images are not cropped."""
        return super().encode_image({name: array for name, array in arrays.items() if name != "num_crops"})


PLUGIN = Gemma3
