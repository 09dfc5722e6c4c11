"""Picture files to RGB, with Pillow.

Only formats that Pillow decodes itself are read, and none whose header says more pixels than allowed, or that is made
of millions of small parts, which Pillow reads one by one. Everything here may take long, or crash in a decoder: it runs
in the media process, and only pictures that a caller holds as objects of Pillow become RGB on a thread of the caller's
process.
"""

from __future__ import annotations

import warnings
from os import SEEK_END
from typing import TYPE_CHECKING, Final, cast

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

if TYPE_CHECKING:
    from typing import BinaryIO

FORMATS: Final = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
"""Others need programs, such as that of PostScript, or are rare."""

MAX_RATIO: Final = 200
"""Of the sides of a picture: processors bring the short one to a fixed length, and the long one in proportion, which
makes gigabytes of a thin line. Qwen's refuse the same pictures.
"""

PillowImage = Image.Image

_MAX_SHORT: Final = 0xFFFF
_MAX_READS: Final = 10_000
_BYTES_PER_READ: Final = 64
"""A file may be read in ``_MAX_READS`` parts, and one more for each of these bytes. Parts of real files have hundreds
of bytes, but for some in their headers; a million parts take a second.
"""


class _Parts:
    """A file that is read in a limited number of parts."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._num_left = _MAX_READS + file.seek(0, SEEK_END) // _BYTES_PER_READ
        file.seek(0)

    def read(self, size: int = -1) -> bytes:
        self._num_left -= 1
        if self._num_left < 0:
            raise ValueError("it has more parts than its length explains")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def limit_pixels(max_pixels: int) -> None:
    """Let Pillow refuse pictures inside of files, too, that have more than ``max_pixels``. For the whole process."""
    Image.MAX_IMAGE_PIXELS = max_pixels
    warnings.simplefilter("error", Image.DecompressionBombWarning)


def open_picture(file: BinaryIO, max_pixels: int) -> Image.Image:
    """Read the header of a picture; nothing is decoded.

    Raises:
        ValueError: this is no picture, or it has more than ``max_pixels`` pixels.
    """
    Image.init()
    try:
        image = Image.open(cast("BinaryIO", _Parts(file)), formats=[name for name in FORMATS if name in Image.OPEN])
    except UnidentifiedImageError:
        raise ValueError(f"it is no picture in a format that is read ({', '.join(FORMATS)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"its header says more than max_image_pixels={max_pixels} pixels ({error})") from None
    except Exception as error:  # decoders raise anything for a broken header
        raise ValueError(f"its header cannot be read: {type(error).__name__}: {error}") from error
    if any(tile[0] == "ppm_plain" for tile in image.tile):  # takes long to read where it has comments
        raise ValueError("it is a PPM whose pixels are text; those of bytes are read")
    check_pixels(image, max_pixels)
    return image


def check_pixels(image: Image.Image, max_pixels: int) -> None:
    """Raise ValueError for a picture without pixels, with too many, or much longer than wide."""
    width, height = image.size
    if width < 1 or height < 1:
        raise ValueError(f"it has {width} x {height} pixels")
    if width * height > max_pixels:
        raise ValueError(f"it has {width} x {height} pixels, and max_image_pixels={max_pixels} are allowed")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ValueError(f"it has {width} x {height} pixels; one side may be {MAX_RATIO} times the other at most")


def decode(image: Image.Image) -> Image.Image:
    """Decode a picture (of an animation the first frame), turn it as its EXIF data say, and make it RGB.

    Alpha is left out, CMYK and palettes are converted, and of 16 bits the upper 8 stay.

    Raises:
        ValueError: it is truncated or damaged.
    """
    try:
        image.load()
        return _rgb(ImageOps.exif_transpose(image) if is_turned(image) else image)
    except Exception as error:  # decoders raise anything for broken data
        raise ValueError(f"it cannot be decoded: {type(error).__name__}: {error}") from error


def is_turned(image: Image.Image) -> bool:
    """Whether a picture is to be turned, as its EXIF data say; most formats have these only when they are decoded.

    Raises:
        ValueError: they are damaged.
    """
    try:
        return bool(image.getexif().get(ExifTags.Base.Orientation, 1) != 1)
    except Exception as error:  # it raises anything for broken data
        raise ValueError(f"its EXIF data cannot be read: {type(error).__name__}: {error}") from error


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode == "I" or image.mode.startswith("I;16"):
        wide = image.convert("I")
        _, peak = wide.getextrema()
        scale = 1 / 256 if isinstance(peak, tuple) or peak <= _MAX_SHORT else 1 / (1 << 23)
        image = wide.point(lambda value: value * scale).convert("L")
    elif image.mode in ("P", "PA"):  # a palette may hold alpha, which Pillow converts in this way alone
        image = image.convert("RGBA")
    return image.convert("RGB")
