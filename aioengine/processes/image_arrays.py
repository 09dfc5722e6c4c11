"""Faster forms of what the image processors of transformers do to every pixel; their results have the same bits.

A pixel has 256 values: what rescaling and normalizing make of each is computed once, by the processor's own methods,
and looked up. Patches are cut while a pixel is still one byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def faster(kind: type[Any]) -> type[Any]:
    """An image processor of transformers (of its class ``PilBackend``) with a table in place of arithmetic."""

    class Faster(kind):
        """Pixels stay bytes, [C, H, W], until they are normalized, or cut into patches where that comes last."""

        _table: Floats | None = None  # [C, 256]

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
            return image if hasattr(kind, "patchify") else looked_up(self._table, image)

        def patchify(
            self, image: npt.NDArray[Any], patch_size: int, merge_size: int, temporal_patch_size: int
        ) -> tuple[npt.NDArray[Any], int, int]:
            if self._table is None or image.dtype != np.uint8:
                return super().patchify(image, patch_size, merge_size, temporal_patch_size)
            num_channels, height, width = image.shape
            rows, columns = height // patch_size, width // patch_size
            parts = image.reshape(
                num_channels, rows // merge_size, merge_size, patch_size, columns // merge_size, merge_size, patch_size
            )
            patches = parts.transpose(0, 1, 4, 2, 5, 3, 6).reshape(num_channels, rows * columns, patch_size**2)
            found = np.empty((rows * columns, num_channels, temporal_patch_size, patch_size**2), np.float32)
            for channel in range(num_channels):
                found[:, channel] = self._table[channel].take(patches[channel])[:, None]
            return found.reshape(rows * columns, -1), rows, columns

    return Faster


def looked_up(table: Floats, image: npt.NDArray[np.uint8]) -> Floats:
    """[C, H, W] from bytes, by the table [C, 256]."""
    found = np.empty(image.shape, np.float32)
    for channel, values in enumerate(table):
        values.take(image[channel], out=found[channel], mode="clip")  # which needs no buffer; no byte is clipped
    return found
