"""Faster forms of what the image processors of transformers do to every pixel; their results have the same bits.

Channels are worked on side by side. A pixel has 256 values: what rescaling and normalizing make of each is computed
once, by the processor's own methods, and looked up. Patches are cut while a pixel is still one byte.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable

Found = TypeVar("Found")
Floats = npt.NDArray[np.float32]

_MIN_PIXELS = 1 << 16
"""Of an image whose channels are worth threads of their own."""

_channels = ThreadPoolExecutor(12, "channel")


def for_channels(work: Callable[[int], Found], image: npt.NDArray[Any]) -> list[Found]:
    """What ``work`` gives for each channel of an image [C, H, W]."""
    numbers = range(len(image))
    return list((map if image[0].size < _MIN_PIXELS else _channels.map)(work, numbers))


def faster(kind: type[Any]) -> type[Any]:
    """An image processor of transformers (of its class ``PilBackend``) with a table in place of arithmetic."""

    class Faster(kind):
        """Pixels stay bytes, [C, H, W], until they are normalized, or cut into patches where that comes last."""

        _table: Floats | None = None  # [C, 256]

        def resize(self, image: npt.NDArray[Any], *arguments: Any, **options: Any) -> npt.NDArray[Any]:
            if image.dtype != np.uint8 or image.ndim != 3:
                return super().resize(image, *arguments, **options)
            resize = super().resize
            return np.concatenate(
                for_channels(lambda channel: resize(image[channel, None], *arguments, **options), image)
            )

        def rescale(self, image: npt.NDArray[Any], scale: float, **options: Any) -> npt.NDArray[Any]:
            if self.do_normalize and image.dtype == np.uint8:
                return image
            return super().rescale(image, scale, **options)

        def normalize(self, image: npt.NDArray[Any], mean: Any, std: Any, **options: Any) -> npt.NDArray[Any]:
            if not self.do_rescale or image.dtype != np.uint8:
                return super().normalize(image, mean, std, **options)
            if self._table is None:  # mean and std are those of the folder, each time
                values = np.repeat(np.arange(256, dtype=np.uint8)[None, None], len(image), axis=0)
                made = super().normalize(super().rescale(values, self.rescale_factor), mean, std)
                self._table = np.ascontiguousarray(made[:, 0], dtype=np.float32)
            if hasattr(kind, "patchify"):
                return image
            found = np.empty(image.shape, np.float32)
            for_channels(partial(look_up, self._table, image, found), image)
            return found

        def patchify(
            self, image: npt.NDArray[Any], patch_size: int, merge_size: int, temporal_patch_size: int
        ) -> tuple[npt.NDArray[Any], int, int]:
            table = self._table
            if table is None or image.dtype != np.uint8:
                return super().patchify(image, patch_size, merge_size, temporal_patch_size)
            _, height, width = image.shape
            rows, columns = height // patch_size, width // patch_size
            found = np.empty((rows * columns, len(image), temporal_patch_size, patch_size**2), np.float32)

            def cut(channel: int) -> None:
                parts = image[channel].reshape(
                    rows // merge_size, merge_size, patch_size, columns // merge_size, merge_size, patch_size
                )
                patches = parts.transpose(0, 3, 1, 4, 2, 5).reshape(rows * columns, 1, patch_size**2)
                found[:, channel] = table[channel].take(patches)

            for_channels(cut, image)
            return found.reshape(rows * columns, -1), rows, columns

    return Faster


def look_up(table: Floats, image: npt.NDArray[np.uint8], found: Floats, channel: int) -> None:
    """One channel of ``found`` [C, H, W] from bytes, by the table [C, 256]."""
    table[channel].take(image[channel], out=found[channel], mode="clip")  # which needs no buffer; no byte is clipped
