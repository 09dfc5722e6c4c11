"""Decodes image files to RGB, with Pillow.

A file is refused if Pillow needs another program for its format, or if its header exceeds the limit of pixels. So is a
file of very many tiny parts, because Pillow reads them one by one. Decoding may be slow or crash, so it runs in the
media process. Only images that the caller opened with Pillow are decoded in the caller's process, on a thread.
"""

from __future__ import annotations

import re
import warnings
from os import SEEK_END
from typing import BinaryIO, Final, cast

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

FORMATS: Final = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
"""Other formats need a program (PostScript) or are rare."""

MAX_RATIO: Final = 200
"""The largest ratio of the sides. Image processors scale the short side to a fixed length, so a thin line would take
gigabytes. The processor of Qwen's models has the same limit.
"""

PillowImage = Image.Image

_MAX_SHORT: Final = 0xFFFF
_MAX_READS: Final = 10_000
_BYTES_PER_READ: Final = 64
"""A file may be read in ``_MAX_READS`` parts, plus one for each ``_BYTES_PER_READ`` bytes. Parts of real files have
hundreds of bytes, except some in headers. A million parts take a second.
"""


class _LimitedFile:
    """A file with a limited number of reads."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._num_left = _MAX_READS + file.seek(0, SEEK_END) // _BYTES_PER_READ
        file.seek(0)

    def read(self, size: int = -1) -> bytes:
        self._num_left -= 1
        if self._num_left < 0:
            raise ValueError("it has too many parts for its length")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def limit_pixels(max_pixels: int) -> None:
    """Let Pillow refuse larger pictures, also embedded pictures, in this process."""
    Image.MAX_IMAGE_PIXELS = max_pixels
    warnings.simplefilter("error", Image.DecompressionBombWarning)


def open_picture(file: BinaryIO, max_pixels: int) -> Image.Image:
    """Read the header of an image file, without decoding pixels.

    Raises ValueError if it is not an image, or has more than ``max_pixels`` pixels.
    """
    Image.init()
    try:
        formats: list[str] = [name for name in FORMATS if name in Image.OPEN]
        image = Image.open(cast("BinaryIO", _LimitedFile(file)), formats=formats)
    except UnidentifiedImageError:
        raise ValueError(f"it is not an image in a supported format ({', '.join(FORMATS)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        num_pixels = "".join(re.findall(r"\d+", str(error))[:1])  # the other number is a limit of Pillow
        raise ValueError(f"it has {num_pixels} pixels, and max_image_pixels={max_pixels} are allowed") from None
    except Exception as error:  # decoders raise any exception for a broken header
        raise ValueError(f"its header cannot be read: {type(error).__name__}: {error}") from error
    if any(tile[0] == "ppm_plain" for tile in image.tile):  # slow to read if it has comments
        raise ValueError("it is a PPM with pixels as text; only binary PPM files are accepted")
    check_pixels(image, max_pixels)
    return image


def check_pixels(image: Image.Image, max_pixels: int) -> None:
    """Raise ValueError for a picture without pixels, with too many pixels, or with too large a ratio of sides."""
    width, height = image.size
    if width < 1 or height < 1:
        raise ValueError(f"it has {width} x {height} pixels")
    if width * height > max_pixels:
        raise ValueError(f"it has {width} x {height} pixels, and max_image_pixels={max_pixels} are allowed")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ValueError(f"it has {width} x {height} pixels; one side may be {MAX_RATIO} times the other at most")


def decode(image: Image.Image) -> Image.Image:
    """Decode a picture to RGB, rotated according to its EXIF data. Of an animation, decode the first frame.

    Alpha is dropped, CMYK and palettes are converted, and the upper 8 of 16 bits are kept.

    Raises ValueError if the picture is truncated or damaged.
    """
    try:
        image.load()
        is_rotated = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
        return _rgb(ImageOps.exif_transpose(image) if is_rotated else image)  # it copies pictures that are not rotated
    except Exception as error:  # decoders raise any exception for broken data
        raise ValueError(f"it cannot be decoded: {type(error).__name__}: {error}") from error


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode == "I" or image.mode.startswith("I;16"):  # 32 or 16 bits; Pillow also reads 16 bits as "I"
        wide = image.convert("I")
        _, peak = wide.getextrema()
        scale = 1 / 256 if isinstance(peak, tuple) or peak <= _MAX_SHORT else 1 / (1 << 23)
        image = wide.point(lambda value: value * scale).convert("L")
    elif image.mode in ("P", "PA"):  # a palette may have alpha, which Pillow converts only to RGBA
        image = image.convert("RGBA")
    return image.convert("RGB")
