"""Files of arrays, in the format of safetensors.

Half of the time that a large file in memory takes is spent on finding memory for it. That can be done before it is
known what the file will hold (``reserve``), beside other work.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping

_TYPES: Final = {
    np.dtype(name): short
    for name, short in (
        *(("float64", "F64"), ("float32", "F32"), ("float16", "F16"), ("int64", "I64"), ("int32", "I32")),
        *(("int16", "I16"), ("int8", "I8"), ("uint8", "U8"), ("bool", "BOOL")),
    )
}
"""Names of types in these files, of those that are read (``runner.tensor_files``)."""

_ALIGNMENT: Final = 8
_LENGTH_BYTES: Final = 8
"""Of the length of the header, which stands before it."""
_BUFFER_BYTES: Final = 1 << 16
"""Small arrays are written together."""


def reserve(path: str, num_bytes: int) -> None:
    """Make a file with memory for ``num_bytes``, where the system can; nothing but time depends on it."""
    if hasattr(os, "posix_fallocate"):
        with contextlib.suppress(OSError), open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)


def write_arrays(path: str, arrays: Mapping[str, npt.NDArray[Any]]) -> int:
    """Write arrays, which are contiguous, to a file, which may be reserved. Returns the bytes of the arrays."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)  # its memory stays
    with os.fdopen(descriptor, "wb", _BUFFER_BYTES) as file:
        file.write(header_of(arrays))
        for array in arrays.values():
            file.write(array.data)
        file.truncate()  # it may have been reserved for more
    return sum(array.nbytes for array in arrays.values())


def header_of(arrays: Mapping[str, npt.NDArray[Any]], *, num_bytes: int = 0) -> bytes:
    """What stands before the bytes of the arrays; at least ``num_bytes``, which are a multiple of 8."""
    header: dict[str, object] = {}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": _TYPES[array.dtype], "shape": array.shape, "data_offsets": (begin, end)}
    encoded = json.dumps(header).encode()
    encoded += b" " * max(-len(encoded) % _ALIGNMENT, num_bytes - _LENGTH_BYTES - len(encoded))
    return len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded
