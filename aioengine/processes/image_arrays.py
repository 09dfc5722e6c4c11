"""A faster form of what the image processors of transformers do to every pixel; results have the same bits.

A byte has 256 values: what rescaling and normalizing make of each is computed once, by the processor's own methods.
Pixels stay bytes, and the device looks their values up in this table; it also cuts them into patches. So a file has an
eighth of the bytes of what the processor gives. Channels are resized side by side.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable

Found = TypeVar("Found")
Bytes = npt.NDArray[np.uint8]

_MIN_PIXELS = 1 << 16
"""Of an image whose channels are worth threads of their own."""

_channels = ThreadPoolExecutor(12, "channel")


def for_channels(work: Callable[[int], Found], image: npt.NDArray[Any]) -> list[Found]:
    """What ``work`` gives for each channel of an image [C, H, W]."""
    numbers = range(len(image))
    return list((map if image[0].size < _MIN_PIXELS else _channels.map)(work, numbers))


def faster(kind: type[Any]) -> type[Any]:
    """An image processor of transformers (of its class ``PilBackend``), given one picture at a time.

    In place of ``pixel_values`` it gives ``pixels`` [..., C, H, W], which are bytes, never cut into patches, with the
    ``table`` [C, 256] of their values; but for settings that do not rescale and normalize.
    """

    class Faster(kind):
        """Its methods get and return bytes [C, H, W] where the ones of transformers have numbers."""

        _table: npt.NDArray[np.float32] | None = None  # [C, 256]

        def resize(self, image: npt.NDArray[Any], *arguments: Any, **options: Any) -> npt.NDArray[Any]:
            if image.dtype != np.uint8 or image.ndim != 3:
                return super().resize(image, *arguments, **options)
            resize = super().resize
            return np.concatenate(
                for_channels(lambda channel: resize(image[channel, None], *arguments, **options), image)
            )

        def rescale(self, image: npt.NDArray[Any], scale: float, **options: Any) -> npt.NDArray[Any]:
            waits = self.do_normalize and image.dtype == np.uint8
            return image if waits else super().rescale(image, scale, **options)

        def normalize(self, image: npt.NDArray[Any], mean: Any, std: Any, **options: Any) -> npt.NDArray[Any]:
            if not self.do_rescale or image.dtype != np.uint8:
                return super().normalize(image, mean, std, **options)
            if self._table is None:  # mean and std are those of the folder, each time
                values = np.repeat(np.arange(256, dtype=np.uint8)[None, None], len(image), axis=0)
                made = super().normalize(super().rescale(values, self.rescale_factor), mean, std)
                self._table = np.ascontiguousarray(made[:, 0], dtype=np.float32)
            return image

        def patchify(self, image: npt.NDArray[Any], patch_size: int, **options: Any) -> tuple[Any, int, int]:
            if self._table is None or image.dtype != np.uint8:
                return super().patchify(image, patch_size, **options)
            return image, image.shape[1] // patch_size, image.shape[2] // patch_size

        def pad(self, images: Any, *arguments: Any, **options: Any) -> Any:
            """Zeros are added behind the normalization, and no byte stands for them: bytes become numbers first."""
            is_tile = isinstance(images, np.ndarray)  # which has the size of all tiles of the picture already
            return super().pad(images if is_tile else values_of(images, self._table), *arguments, **options)

        def _preprocess(self, *arguments: Any, **options: Any) -> Any:
            found = super()._preprocess(*arguments, **options)
            pixels = found["pixel_values"]
            if self._table is not None and isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8:
                found["pixels"], found["table"] = found.pop("pixel_values"), self._table
            return found

    return Faster


def values_of(images: list[npt.NDArray[Any]], table: npt.NDArray[np.float32] | None) -> list[npt.NDArray[Any]]:
    """Images [C, H, W] with numbers in place of bytes, by the table [C, 256]."""
    if table is None:
        return images
    return [
        np.stack([row.take(channel) for row, channel in zip(table, image, strict=True)])
        if image.dtype == np.uint8
        else image
        for image in images
    ]
