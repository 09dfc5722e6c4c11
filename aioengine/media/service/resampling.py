"""Bicubic resizing of bytes as Pillow does it, as tables of whole numbers: a GPU gets the same bits from them.

Each column, and then each row, of the result is a sum of a few columns (rows) of the picture, with weights in fixed
point (Keys, "Cubic convolution interpolation for digital image processing", 1981; with a = -0.5). Sums are rounded to
bytes after either pass, so the order of the two matters: it depends on the version of Pillow, and is found by trial.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from aioengine.protocol.media import RESIZE_BITS

if TYPE_CHECKING:
    from collections.abc import Callable

    Bytes = npt.NDArray[np.uint8]
    RowsFirst = Callable[[int, int, int, int], bool]
    """From the height and width of a picture and those of the result."""

MAX_PROPORTION: Final = 100
"""Some versions of Pillow resize a picture that is more times higher than wide in another order."""

_TRIALS: Final = (
    *((9, 13, 5, 11), (13, 9, 30, 9), (40, 30, 41, 32), (40, 30, 18, 13), (30, 40, 13, 39), (31, 17, 7, 90)),
    *((64, 60, 28, 56), (60, 64, 59, 60), (50, 50, 30, 40), (50, 50, 29, 40), (1, 1, 4, 3), (90, 2, 28, 28)),
)
"""Heights and widths, before and after, that tell orders apart."""


class Taps(NamedTuple):
    """One pass, to N columns or rows: number n is the sum of K from ``starts[n]`` on, times ``weights[n]``.

    Attributes:
        starts: [N] int32.
        weights: [N, K] int32, with ``RESIZE_BITS`` bits behind the point; 0 beyond the end of the picture.
    """

    starts: npt.NDArray[np.int32]
    weights: npt.NDArray[np.int32]


def taps(old: int, new: int) -> Taps:
    """From ``old`` columns or rows to ``new`` ones."""
    if old == new:  # it is no pass for Pillow
        return Taps(np.arange(new, dtype=np.int32), np.full((new, 1), 1 << RESIZE_BITS, np.int32))
    stretch = max(old / new, 1.0)
    centers = (np.arange(new) + 0.5) * (old / new)
    starts = np.maximum((centers - 2.0 * stretch + 0.5).astype(np.int64), 0)
    ends = np.minimum((centers + 2.0 * stretch + 0.5).astype(np.int64), old)
    places = starts[:, None] + np.arange((ends - starts).max())
    weights = _cubic((places - centers[:, None] + 0.5) * (1.0 / stretch))
    weights[places >= ends[:, None]] = 0.0
    weights /= np.cumsum(weights, 1)[:, -1:]  # one after the other, as the last bit depends on it
    fixed = np.trunc(weights * (1 << RESIZE_BITS) + np.where(weights < 0, -0.5, 0.5))
    return Taps(starts.astype(np.int32), fixed.astype(np.int32))


def _cubic(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def find_order() -> RowsFirst | None:
    """When the installed Pillow resizes rows before columns; None: it resizes in no way that is known here."""
    draw = np.random.default_rng(0)
    trials = [(draw.integers(0, 256, size[:2], dtype=np.uint8), size) for size in _TRIALS]
    for rows_first in (_never, _where_rows_shrink_more):
        if all(_is_pillows(picture, size, is_first=rows_first(*size)) for picture, size in trials):
            return rows_first
    return None


def _never(_height: int, _width: int, _new_height: int, _new_width: int) -> bool:
    return False


def _where_rows_shrink_more(height: int, width: int, new_height: int, new_width: int) -> bool:
    return new_height < height and height - new_height > 2 * (width - new_width)


def _is_pillows(picture: Bytes, size: tuple[int, int, int, int], *, is_first: bool) -> bool:
    height, width, new_height, new_width = size
    rows, columns = taps(height, new_height), taps(width, new_width)
    if is_first:
        found = _resampled(_resampled(picture.T, rows).T, columns)
    else:
        found = _resampled(_resampled(picture, columns).T, rows).T
    wanted = Image.fromarray(picture).resize((new_width, new_height), Image.Resampling.BICUBIC)
    return np.array_equal(found, np.asarray(wanted))


def _resampled(picture: Bytes, columns: Taps) -> Bytes:
    """[rows, columns] -> [rows, N]."""
    places = columns.starts[:, None] + np.arange(columns.weights.shape[1])
    parts = picture[:, np.minimum(places, picture.shape[1] - 1)].astype(np.int32) * columns.weights
    return np.clip((parts.sum(2, dtype=np.int32) + (1 << (RESIZE_BITS - 1))) >> RESIZE_BITS, 0, 255).astype(np.uint8)
