"""The bytes of a decoded picture where Pillow has them, without a copy.

Pillow lends them through the C data interface of Apache Arrow (arrow.apache.org/docs/format/CDataInterface.html), of
which this reads as much as a picture needs.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import numpy.typing as npt
from PIL import Image

if TYPE_CHECKING:
    from typing import Any

    Bytes = npt.NDArray[np.uint8]

STORED_BYTES: Final = 4
"""Bytes of a pixel in Pillow's memory: three colours, and one that says nothing."""


class _Array(ctypes.Structure):
    """``struct ArrowArray``."""


_Array._fields_ = [
    *((name, ctypes.c_int64) for name in ("length", "null_count", "offset", "n_buffers", "n_children")),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_Array))),
    *((name, ctypes.c_void_p) for name in ("dictionary", "release", "private_data")),
]

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


def bytes_of(image: Image.Image) -> Bytes:
    """The bytes [height, width, 4] of an RGB picture, of which the fourth of a pixel says nothing.

    They are Pillow's own, to be read for as long as the array lives. Where Pillow cannot lend them they are a copy
    [height, width, 3]: versions before 11.2, and pictures that it keeps in several parts, above 4 million pixels.
    """
    lent = _lent(image)
    return np.asarray(image) if lent is None else lent


def _lent(image: Image.Image) -> Bytes | None:
    core = cast("Any", Image.core)
    if not hasattr(image.im, "__arrow_c_array__") or core.get_alignment() != 1:  # rows would have gaps
        return None
    try:
        capsule = image.im.__arrow_c_array__()
    except ValueError:  # several parts
        return None
    pixels = ctypes.cast(_pointer_of(capsule, b"arrow_array"), ctypes.POINTER(_Array)).contents
    if pixels.n_children != 1:
        return None
    stored, num_bytes = pixels.children[0].contents, STORED_BYTES * image.width * image.height
    if pixels.offset or stored.offset or stored.length != num_bytes:
        return None
    lent = (ctypes.c_uint8 * num_bytes).from_address(stored.buffers[1])
    vars(lent)["capsule"] = capsule  # keeps the memory
    return np.ctypeslib.as_array(lent).reshape(image.height, image.width, STORED_BYTES)
