"""Describes bicubic resizes of Pillow by integer tables, from which a GPU computes the same bits.

Pillow resizes columns and rows in two passes. Each column (row) of a pass is a sum of a few columns (rows), with
fixed-point weights (Keys, "Cubic convolution interpolation for digital image processing", 1981; a = -0.5). Sums are
rounded to bytes after each pass, so the order of the passes matters. It depends on the version of Pillow, and no public
attribute tells it: we resize small pictures to find it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from aioengine.protocol.media import RESIZE_BITS

Bytes = npt.NDArray[np.uint8]
RowsFirst = Callable[[int, int, int, int], bool]
"""Takes the height and width of a picture, and of the result."""

MAX_PROPORTION: Final = 100
"""Some versions of Pillow use another order for pictures whose height is a larger multiple of their width."""

MAX_SHRINKING: Final = 4
"""A picture with a larger multiple of the result's pixels is resized here, instead of being copied to the device."""

_CACHED_SIZES: Final = 16

_TRIALS: Final = (
    *((9, 13, 5, 11), (13, 9, 30, 9), (40, 30, 41, 32), (40, 30, 18, 13), (30, 40, 13, 39), (31, 17, 7, 90)),
    *((64, 60, 28, 56), (60, 64, 59, 60), (50, 50, 30, 40), (50, 50, 29, 40), (1, 1, 4, 3), (90, 2, 28, 28)),
)
"""Heights and widths, before and after a resize, for which the orders give different results."""


class Taps(NamedTuple):
    """One pass to N columns or rows: output n is the sum of K inputs from ``starts[n]`` on, times ``weights[n]``.

    Attributes:
        starts: [N] int32.
        weights: [N, K] int32, with ``RESIZE_BITS`` fractional bits; 0 beyond the end of the picture.
    """

    starts: npt.NDArray[np.int32]
    weights: npt.NDArray[np.int32]


def taps(old: int, new: int) -> Taps:
    """Return the pass from ``old`` columns or rows to ``new``."""
    if old == new:  # Pillow skips this pass
        return Taps(np.arange(new, dtype=np.int32), np.full((new, 1), 1 << RESIZE_BITS, np.int32))
    stretch = max(old / new, 1.0)
    centers = (np.arange(new) + 0.5) * (old / new)
    starts = np.maximum((centers - 2.0 * stretch + 0.5).astype(np.int64), 0)
    ends = np.minimum((centers + 2.0 * stretch + 0.5).astype(np.int64), old)
    indices = starts[:, None] + np.arange((ends - starts).max())
    weights = _cubic((indices - centers[:, None] + 0.5) * (1.0 / stretch))
    weights[indices >= ends[:, None]] = 0.0
    weights /= np.cumsum(weights, 1)[:, -1:]  # sums in order: the last bit depends on it
    fixed = np.trunc(weights * (1 << RESIZE_BITS) + np.where(weights < 0, -0.5, 0.5))
    return Taps(starts.astype(np.int32), fixed.astype(np.int32))


def _cubic(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def find_order() -> RowsFirst | None:
    """Return when the installed Pillow resizes rows before columns; None if it matches no known order."""
    return next((order for order in (lambda *_: False, _if_rows_shrink_more) if _matches(order)), None)


def _matches(rows_first: RowsFirst) -> bool:
    """Whether the installed Pillow resizes pictures of all ``_TRIALS`` in this order."""
    draw = np.random.default_rng(0)
    for sizes in _TRIALS:
        height, width, new_height, new_width = sizes
        picture = draw.integers(0, 256, (height, width), dtype=np.uint8)
        passes = [(0, taps(height, new_height)), (1, taps(width, new_width))]
        resized = picture
        for axis, one_pass in passes if rows_first(*sizes) else reversed(passes):
            resized = _run_pass(resized, one_pass, axis)
        expected = Image.fromarray(picture).resize((new_width, new_height), Image.Resampling.BICUBIC)
        if not np.array_equal(resized, np.asarray(expected)):
            return False
    return True


def _if_rows_shrink_more(height: int, width: int, new_height: int, new_width: int) -> bool:
    return new_height < height and height - new_height > 2 * (width - new_width)


def _run_pass(picture: Bytes, one_pass: Taps, axis: int) -> Bytes:
    pixels = np.moveaxis(picture, axis, 1)
    indices = one_pass.starts[:, None] + np.arange(one_pass.weights.shape[1])
    products = pixels[:, np.minimum(indices, pixels.shape[1] - 1)].astype(np.int32) * one_pass.weights
    sums = (products.sum(2, dtype=np.int32) + (1 << (RESIZE_BITS - 1))) >> RESIZE_BITS
    return np.moveaxis(np.clip(sums, 0, 255).astype(np.uint8), 1, axis)


def value_table(processor: Any) -> npt.NDArray[np.float32] | None:
    """Return the values [3, 256] of bytes in each channel; None if the processor does not rescale and normalize."""
    if not (processor.do_rescale and processor.do_normalize):
        return None
    bytes_of_channels = np.tile(np.arange(256, dtype=np.uint8), (3, 1, 1))
    rescaled = processor.rescale(bytes_of_channels, processor.rescale_factor)
    values = processor.normalize(rescaled, processor.image_mean, processor.image_std)
    return np.ascontiguousarray(values[:, 0], dtype=np.float32)


class DeviceResize:
    """The arrays with which the device resizes a picture, with the bits of the image processor of Qwen's models.

    They depend only on the size of the picture, and are cached: the next picture often has the same size.
    """

    def __init__(self, processor: Any, smart_resize: Callable[..., tuple[int, int]], rows_first: RowsFirst) -> None:
        """processor: of transformers. smart_resize: returns the new size."""
        self._processor = processor
        self._table = value_table(processor)
        self._smart_resize = smart_resize
        self._rows_first = rows_first
        self.arrays = lru_cache(_CACHED_SIZES)(self._arrays)

    def _arrays(self, height: int, width: int) -> Mapping[str, npt.NDArray[Any]] | None:
        """Return the arrays for a size; None if the processor must prepare the picture itself.

        ``row_starts``, ``row_weights``, ``column_starts`` and ``column_weights`` are the passes (``Taps``),
        ``rows_first`` [1] is their order. ``table`` and ``image_grid_thw`` [1, 3] come from the processor.

        Raises ValueError if the processor refuses the size.
        """
        processor = self._processor
        step = processor.patch_size * processor.merge_size
        new_height, new_width = height, width
        if not processor.do_resize:
            check_patches(height, width, step)
        else:
            low, high = processor.size.shortest_edge, processor.size.longest_edge
            new_height, new_width = self._smart_resize(height, width, step, low, high)
            is_close = height * width <= MAX_SHRINKING * new_height * new_width
            if not is_close or processor.resample != Image.Resampling.BICUBIC or height > MAX_PROPORTION * width:
                return None
        if self._table is None:
            return None
        row_starts, row_weights = taps(height, new_height)
        column_starts, column_weights = taps(width, new_width)
        grid = 1, new_height // processor.patch_size, new_width // processor.patch_size
        return {
            "table": self._table,
            "image_grid_thw": np.array([grid], dtype=np.int64),
            "row_starts": row_starts,
            "row_weights": row_weights,
            "column_starts": column_starts,
            "column_weights": column_weights,
            "rows_first": np.array([self._rows_first(height, width, new_height, new_width)]),
        }


def check_patches(height: int, width: int, step: int) -> None:
    """Raise ValueError if a picture cannot be cut into squares of ``step`` pixels."""
    if height % step or width % step:
        raise ValueError(f"it has {width} x {height} pixels, and without resizing both must be multiples of {step}")
