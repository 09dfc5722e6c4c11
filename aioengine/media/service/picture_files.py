"""Files for pictures, made before they are needed: Pillow decodes straight into their memory.

Such a picture is not copied once it is decoded, and memory for it is found while no request waits. The files are those
of ``array_files``, with the picture in front. They have no name until they are complete, so that a process that dies
leaves none behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from PIL import Image

from aioengine.media import pictures
from aioengine.media.service.array_files import header_of, write_arrays
from aioengine.media.service.picture_bytes import STORED_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

MAX_SPARE_BYTES: Final = 1 << 26
MAX_SPARES: Final = 4

_BEGIN: Final = 4096
"""Where the picture begins in a file: behind a header that is filled up with spaces."""

_FORMATS: Final = ("JPEG", "MPO")
"""The most frequent ones, and those that say before they are decoded whether they will be turned."""


class PictureFile:
    """A file with memory for ``num_bytes`` of a picture, which is mapped."""

    def __init__(self, folder: str, num_bytes: int) -> None:
        """Raises OSError: the system makes no such files there, or has no memory for it."""
        self.num_bytes = num_bytes
        self._image: Image.Image | None = None
        self._core: object = None
        self._descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self._descriptor, 0, _BEGIN + num_bytes)  # else the decoder would die without memory
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._memory = mmap.mmap(self._descriptor, _BEGIN + num_bytes, flags=flags)
        except BaseException:
            os.close(self._descriptor)
            raise

    def offer(self, image: Image.Image) -> None:
        """Have a picture for which ``fits_in_file`` decoded into this file, which must have room for it."""
        core = cast("Any", Image.core)
        self._image = image
        self._core = image.im = core.map_buffer(self._memory, image.size, "raw", _BEGIN, ("RGB", 0, 1))

    def bytes_of(self, decoded: Image.Image) -> Bytes | None:
        """Those of the decoded picture [height, width, 4], in the file; None: it was decoded to elsewhere.

        The fourth byte of a pixel says nothing. They can be read for as long as the array lives.
        """
        if decoded is not self._image or decoded.im is not self._core:
            return None
        shape = decoded.height, decoded.width, STORED_BYTES
        return np.frombuffer(self._memory, np.uint8, np.prod(shape), _BEGIN).reshape(shape)

    def finish(self, path: str, arrays: Mapping[str, npt.NDArray[Any]]) -> int:
        """Name the file, in which the first of these arrays is the picture that is there. Returns their bytes.

        The others, which are contiguous, are written behind it.
        """
        picture, *others = arrays.values()
        header = header_of(arrays, num_bytes=_BEGIN)
        assert len(header) == _BEGIN, "the header has no room before the picture"
        os.pwrite(self._descriptor, header, 0)
        rest = b"".join(array.tobytes() for array in others)
        end = _BEGIN + picture.nbytes
        os.ftruncate(self._descriptor, end + len(rest))
        os.pwrite(self._descriptor, rest, end)
        try:  # a directory must be named, or Python does not follow the link to the file
            os.link(f"/proc/self/fd/{self._descriptor}", path, src_dir_fd=self._descriptor)
        except OSError:  # without /proc, for example
            write_arrays(path, arrays)
        return end + len(rest) - _BEGIN

    def close(self) -> None:
        """Without a name it is gone with this, once nothing reads its memory any more."""
        os.close(self._descriptor)


def fits_in_file(image: Image.Image) -> bool:
    """Whether a picture that was only opened can be decoded into a ``PictureFile``, and stays as it is there.

    Raises:
        ValueError: its EXIF data are damaged.
    """
    return image.mode == "RGB" and image.format in _FORMATS and not pictures.is_turned(image)


class SpareFiles:
    """Files for the next pictures, which often have the size of the last one. From any thread."""

    def __init__(self) -> None:
        self._files: list[PictureFile] = []  # the oldest first
        self._wanted: deque[tuple[str, int]] = deque()
        self._used: deque[PictureFile] = deque()
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> PictureFile | None:
        """The smallest that has room, which is the caller's from now on; None: there is none."""
        with self._lock:
            fitting = [file for file in self._files if file.num_bytes >= num_bytes]
            found = min(fitting, key=lambda file: file.num_bytes, default=None)
            if found is not None:
                self._files.remove(found)
        return found

    def give_back(self, file: PictureFile) -> None:
        """Have ``make`` close one that was taken, which takes a moment."""
        self._used.append(file)

    def want(self, folder: str, num_bytes: int) -> None:
        """Have ``make`` make one with room for ``num_bytes``."""
        if num_bytes <= MAX_SPARE_BYTES and hasattr(os, "O_TMPFILE"):
            self._wanted.append((folder, num_bytes))

    def make(self) -> None:
        """Close used files, and make those that are wanted, as far as the system can. If there are too many then, the
        oldest ones go.
        """
        while self._used:
            with contextlib.suppress(IndexError):  # another thread may have taken the last one
                self._used.popleft().close()
        while self._wanted:
            with contextlib.suppress(OSError, IndexError):  # another thread may have taken the last one
                made = PictureFile(*self._wanted.popleft())
                with self._lock:
                    self._files.append(made)
                    while len(self._files) > MAX_SPARES or self._num_bytes > MAX_SPARE_BYTES:
                        self._files.pop(0).close()

    @property
    def _num_bytes(self) -> int:
        return sum(file.num_bytes for file in self._files)
