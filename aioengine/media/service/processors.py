"""The image processors of transformers, with bytes for pixels. The results have the same bits.

A byte has 256 values, so the processor rescales and normalizes a table of them once. Pixels stay bytes. The device
looks up their values, and cuts images into patches. A file has a quarter of the bytes of the processor's own results,
for Qwen's models an eighth.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from aioengine.media.service.resizing import DeviceResize, check_patches, find_order, value_table
from aioengine.protocol.media import MediaOrders

Bytes = npt.NDArray[np.uint8]

_MIN_PIXELS = 1 << 16
"""Larger images are resized with one thread per channel."""

_channels = ThreadPoolExecutor(12, "channel")

Preprocess = Callable[..., Mapping[str, object]]
"""An image processor of transformers."""


def load_processor(orders: MediaOrders) -> tuple[Preprocess, DeviceResize | None]:
    """Load the image processor of the model, and the resize on the device if the orders and the processor allow it."""
    # transformers imports torch wherever it finds it, which takes seconds, and these processors do not use it.
    if "torch" not in sys.modules:
        sys.modules["torch"] = cast("ModuleType", None)
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # a warning would be reported as the last line of a crash
    module_name, _, name = orders.processor.partition(":")
    module = importlib.import_module(module_name)
    kind: Any = getattr(module, name)
    device_resize = None
    if orders.resizes_on_device and hasattr(kind, "patchify") and (rows_first := find_order()) is not None:
        device_resize = DeviceResize(kind.from_dict(dict(orders.settings)), module.smart_resize, rows_first)
    return with_bytes(kind).from_dict(dict(orders.settings)), device_resize


def with_bytes(kind: type[Any]) -> type[Any]:
    """Return a subclass of an image processor (a ``PilBackend`` of transformers) that takes one RGB picture at a time.

    If its settings rescale and normalize, it returns ``pixels`` [..., C, H, W], which are bytes and not cut into
    patches, and their ``table`` [C, 256], instead of ``pixel_values``.
    """

    class ByteImages(kind):
        """Its methods receive and return bytes [C, H, W]."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._table: npt.NDArray[np.float32] | None = None
            self._table = value_table(self)

        def resize(self, image: npt.NDArray[Any], *arguments: Any, **options: Any) -> npt.NDArray[Any]:
            resize = super().resize
            if image.dtype != np.uint8 or image.ndim != 3 or image[0].size < _MIN_PIXELS:
                return resize(image, *arguments, **options)
            resized = _channels.map(lambda channel: resize(channel[None], *arguments, **options), image)
            return np.concatenate(list(resized))

        def rescale(self, image: npt.NDArray[Any], scale: float, **options: Any) -> npt.NDArray[Any]:
            is_looked_up = self._table is not None and image.dtype == np.uint8
            return image if is_looked_up else super().rescale(image, scale, **options)

        def normalize(self, image: npt.NDArray[Any], *arguments: Any, **options: Any) -> npt.NDArray[Any]:
            is_looked_up = self._table is not None and image.dtype == np.uint8
            return image if is_looked_up else super().normalize(image, *arguments, **options)

        def patchify(self, image: npt.NDArray[Any], patch_size: int, **options: Any) -> tuple[Any, int, int]:
            height, width = image.shape[1:]
            check_patches(height, width, patch_size * options["merge_size"])
            if self._table is None or image.dtype != np.uint8:
                return super().patchify(image, patch_size, **options)
            return image, height // patch_size, width // patch_size

        def pad(self, images: Any, *arguments: Any, **options: Any) -> Any:
            """Padding is zero after normalization, and no byte has this value: bytes become values first."""
            is_tile = isinstance(images, np.ndarray)  # all tiles of a picture have one size already
            if not is_tile and self._table is not None:
                images = [
                    np.stack([row.take(channel) for row, channel in zip(self._table, image, strict=True)])
                    if image.dtype == np.uint8
                    else image
                    for image in images
                ]
            return super().pad(images, *arguments, **options)

        def _preprocess(self, *arguments: Any, **options: Any) -> Any:
            arrays = super()._preprocess(*arguments, **options)
            pixels = arrays["pixel_values"]
            if self._table is not None and isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8:
                arrays["pixels"], arrays["table"] = arrays.pop("pixel_values"), self._table
            return arrays

    return ByteImages
