"""Random pictures, and the bytes of picture files."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def random_picture(width: int, height: int) -> Image.Image:
    """Return a random RGB picture. Pictures of the same size are equal."""
    draw = np.random.default_rng(width * height)
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))


def file_of(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """Return the bytes of a file of this kind."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
