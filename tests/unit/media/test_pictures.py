"""Pictures of all modes are converted to RGB. Broken and too large pictures are refused."""

from __future__ import annotations

import io
import zlib

import numpy as np
import pytest
from PIL import Image

from aioengine.media import pictures
from tests.kit.pictures import file_of

MAX_PIXELS = 10_000
COLORS = np.arange(12 * 9 * 3, dtype=np.uint8).reshape(9, 12, 3)
RGB = Image.fromarray(COLORS)


def read(data: bytes) -> Image.Image:
    return pictures.decode(pictures.open_picture(io.BytesIO(data), MAX_PIXELS))


def pixels(image: Image.Image) -> np.ndarray:
    assert image.mode == "RGB"
    return np.asarray(image)


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """Return a PNG of 8-bit RGB whose header may have a wrong size."""
    header = width.to_bytes(4) + height.to_bytes(4) + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_rgb_stays_as_it_is(kind: str) -> None:
    assert np.array_equal(pixels(read(file_of(RGB, kind))), COLORS)


@pytest.mark.parametrize("mode", ["L", "1", "LA", "RGBA", "P", "CMYK", "YCbCr", "HSV", "F", "PA"])
def test_other_modes_become_rgb_as_pillow_converts_them(mode: str) -> None:
    odd = RGB.convert("RGBA").convert(mode) if mode == "PA" else RGB.convert(mode)
    expected = odd.convert("RGBA").convert("RGB") if mode in ("P", "PA") else odd.convert("RGB")
    assert np.array_equal(pixels(pictures.decode(odd)), np.asarray(expected))


def test_a_cmyk_jpeg_and_a_palette_with_alpha_are_read() -> None:
    assert pixels(read(file_of(RGB.convert("CMYK"), "JPEG"))).shape == (9, 12, 3)
    palette = RGB.quantize(16)
    assert np.array_equal(pixels(read(file_of(palette, "PNG", transparency=0))), np.asarray(palette.convert("RGB")))
    assert np.array_equal(
        pixels(read(file_of(palette, "PNG", transparency=bytes(16)))), np.asarray(palette.convert("RGB"))
    )


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_upper_8_of_16_bits_are_kept(kind: str) -> None:
    deep = np.linspace(0, 65535, 108, dtype=np.uint16).reshape(9, 12)
    result = pixels(read(file_of(Image.fromarray(deep), kind)))
    assert np.array_equal(result[..., 0], (deep >> 8).astype(np.uint8))
    assert np.array_equal(result[..., 0], result[..., 2])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = pixels(read(file_of(RGB, "PNG", exif=exif)))
    assert turned.shape[:2] == ((12, 9) if orientation > 4 else (9, 12))
    expected = {1: COLORS, 3: COLORS[::-1, ::-1], 6: np.rot90(COLORS, -1), 8: np.rot90(COLORS)}
    assert np.array_equal(turned, expected.get(orientation, turned))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "TIFF"])
def test_first_frame_of_an_animation_is_read(kind: str) -> None:
    frames = [Image.new("RGB", (12, 9), color) for color in ("red", "blue")]
    result = pixels(read(file_of(frames[0], kind, save_all=True, append_images=frames[1:])))
    assert result[0, 0].tolist() == [255, 0, 0]


def test_the_smallest_picture_is_read() -> None:
    assert pixels(read(file_of(Image.new("RGB", (1, 1), "red"), "PNG"))).tolist() == [[[255, 0, 0]]]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not an image in a supported format"),
        (b"hello", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not an image"),
        (b"\x89PNG\r\n\x1a\n", "not an image|header cannot be read"),
        (png(100_000, 100_000), "it has 10000000000 pixels, and max_image_pixels=10000 are allowed"),
        (png(101, 100), r"101 x 100 pixels, and max_image_pixels=10000"),
        (png(100, 100, bytes(500)), "cannot be decoded"),
        (file_of(RGB, "PNG")[:-30], "cannot be decoded"),
        (file_of(RGB, "JPEG")[:-30], "cannot be decoded"),
        (file_of(RGB, "GIF")[:60], "not an image|cannot be decoded|header cannot be read"),
    ],
)
def test_incomplete_picture_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(data)


@pytest.mark.parametrize("size", [(1, 201), (402, 2), (1, 9_999)])
def test_thin_lines_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="one side may be 200 times the other at most"):
        read(file_of(Image.new("L", size), "PNG"))
    assert read(file_of(Image.new("L", (200, 1)), "PNG")).size == (200, 1)


def many_parts(kind: str) -> bytes:
    """Return a small picture with 100,000s of bytes in tiny parts, or in one part that Pillow reads byte by byte."""
    file = file_of(RGB, kind)
    if kind == "PPM":
        return file[:3] + b"#" + b"x" * 200_000 + b"\n" + file[3:]
    if kind == "PNG":
        return file[:33] + chunk(b"abCd", b"") * 20_000 + file[33:]
    if kind == "JPEG":
        return file[:2] + b"\xff" * 200_000 + file[2:]
    place = file.index(b"\x2c", 13)
    return file[:place] + b"\x21\xfe" + b"\x01c" * 100_000 + b"\0" + file[place:]


@pytest.mark.parametrize("kind", ["PPM", "PNG", "JPEG", "GIF"])
def test_files_of_very_many_tiny_parts_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="too many parts for its length"):
        read(many_parts(kind))


def test_number_of_parts_may_grow_with_the_length_of_the_file() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (600, 600, 3), dtype=np.uint8)
    file = file_of(Image.fromarray(noise), "PNG")
    assert len(file) > 1_000_000
    picture = pictures.decode(pictures.open_picture(io.BytesIO(file), noise.size))
    assert np.array_equal(pixels(picture), noise)


def test_chunks_after_the_pixels_are_counted() -> None:
    file = file_of(RGB, "PNG")
    with pytest.raises(ValueError, match="too many parts for its length"):
        read(file[:-12] + chunk(b"abCd", b"") * 20_000 + file[-12:])


def test_pixels_written_as_text_are_refused() -> None:
    with pytest.raises(ValueError, match="a PPM with pixels as text"):
        read(b"P3\n1 1\n255\n1 2 3\n")
