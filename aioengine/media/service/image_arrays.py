"""A faster form of what the image processors of transformers do to every pixel; results have the same bits.

A byte has 256 values: what rescaling and normalizing make of each is computed once, by the processor's own methods.
Pixels stay bytes, and the device looks their values up in this table; it also cuts them into patches. So a file has an
eighth of the bytes of what the processor gives. Channels are resized side by side, or all by the device.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from aioengine.media.service import resampling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aioengine.media.service.resampling import RowsFirst

Found = TypeVar("Found")
Bytes = npt.NDArray[np.uint8]

_MIN_PIXELS = 1 << 16
"""Of an image whose channels are worth threads of their own."""

MAX_SHRINKING = 4
"""Times the pixels of the result: a picture with more is not moved to the device, but resized first."""

_KEPT_SIZES = 16

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
            height, width = image.shape[1:]
            check_whole(height, width, patch_size * options["merge_size"])
            if self._table is None or image.dtype != np.uint8:
                return super().patchify(image, patch_size, **options)
            return image, height // patch_size, width // patch_size

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


def check_whole(height: int, width: int, step: int) -> None:
    """Raise ValueError for a picture that cannot be cut into squares of ``step`` pixels."""
    if height % step or width % step:
        message = f"it has {width} x {height} pixels, and without resizing both must be multiples of {step}"
        raise ValueError(message)


class LatePictures:
    """What the device reads beside the bytes of a picture, for the processor of Qwen's models: resizing is left to it.

    All of it follows from the size of the picture alone, and is kept: the next picture often has the same.
    """

    def __init__(
        self,
        kind: type[Any],
        settings: Mapping[str, object],
        goal_of: Callable[..., tuple[int, int]],
        rows_first: RowsFirst,
    ) -> None:
        """kind: the image processor of transformers. goal_of: its function that gives height and width of a result."""
        self._processor: Any = _sized(kind, goal_of).from_dict(dict(settings))
        self._rows_first = rows_first
        self.beside = lru_cache(_KEPT_SIZES)(self._beside)

    def _beside(self, height: int, width: int) -> Mapping[str, npt.NDArray[Any]] | None:
        """For a picture of this size; None: it is made ready by the processor itself.

        They are the ``table`` and ``image_grid_thw`` of ``faster(kind)``, and the passes that resize the picture
        (``Taps``), as ``row_starts``, ``row_weights``, ``column_starts`` and ``column_weights``, with ``rows_first``
        [1]. A picture that becomes much smaller is resized here, and one that is not resized bicubically.

        Raises ValueError where the processor refuses the size.
        """
        options = {"input_data_format": "channels_last", "return_tensors": "np", "do_convert_rgb": False}
        try:
            found = dict(self._processor(np.broadcast_to(np.uint8(0), (height, width, 3)), **options))
        except _ResizedHereError:
            return None
        if "pixels" not in found:
            return None
        new_height, new_width = found.pop("pixels").shape[-2:]
        found["row_starts"], found["row_weights"] = resampling.taps(height, new_height)
        found["column_starts"], found["column_weights"] = resampling.taps(width, new_width)
        found["rows_first"] = np.array([self._rows_first(height, width, new_height, new_width)])
        return found


class _ResizedHereError(Exception):
    """The device does not resize this picture."""


def _sized(kind: type[Any], goal_of: Callable[..., tuple[int, int]]) -> type[Any]:
    """A form of ``faster(kind)`` whose ``pixels`` have a size, and no bytes."""

    class Sized(faster(kind)):
        def resize(self, image: npt.NDArray[Any], *, size: Any, resample: Any, factor: int) -> npt.NDArray[Any]:
            height, width = image.shape[-2:]
            goal = goal_of(height, width, factor, size.shortest_edge, size.longest_edge)
            is_byte = image.dtype == np.uint8 and self.do_rescale and self.do_normalize
            is_close = height * width <= MAX_SHRINKING * goal[0] * goal[1]
            is_known = resample == Image.Resampling.BICUBIC and height <= resampling.MAX_PROPORTION * width
            if not (is_byte and is_close and is_known):
                raise _ResizedHereError
            return np.broadcast_to(np.uint8(0), (len(image), *goal))

        def patchify(self, image: npt.NDArray[Any], patch_size: int, **options: Any) -> tuple[Any, int, int]:
            patches, rows, columns = super().patchify(image, patch_size, **options)
            return patches[:0], rows, columns

    return Sized


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
