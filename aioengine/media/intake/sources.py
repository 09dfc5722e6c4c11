"""The images that callers pass: paths, URLs, base64 text, bytes, and images of Pillow.

Their types and number are checked at the call. Their bytes are read later, by ``read_source`` on a thread, or by the
media process if they must be downloaded.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import stat
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol, cast, runtime_checkable
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from aioengine.api import checks
from aioengine.settings.config import MediaConfig

ALLOWED: Final = "a path, a URL, base64 text, bytes or a PIL image"
CONTENT: Final = ("image", "url", "path", "base64")
"""Keys of the image in a part ``{"type": "image", ...}`` of a message."""

NOT_TRUNCATED: Final = "truncate_prompt_tokens is for prompts without images, which cannot be cut; shorten the text"
MAX_PATH: Final = 4096
MAX_URL: Final = 8192
_WEB: Final = ("http://", "https://")
_DECODING: Final = tuple(threading.Lock() for _ in range(61))
"""Locks by the id of an image of Pillow. Decoding loads an image that was only opened, which is not thread-safe."""
_URL_SAFE: Final = bytes.maketrans(b"-_", b"+/")
_SHOWN: Final = 80
_SLACK: Final = 4096
_MIN_PICTURE: Final = 14
"""Bytes of the smallest image file, a PPM of one pixel."""


class ImageSource(NamedTuple):
    """An image of a caller. kind: "web", "text" (path, data: URL or base64), "path", "bytes" or "picture" (Pillow)."""

    kind: str
    value: object

    @property
    def num_bytes(self) -> int:
        """Memory that the image takes in the caller's process."""
        if self.kind == "picture":
            width, height = cast("Picture", self.value).size
            return 3 * width * height
        return len(cast("str | bytes", self.value)) if self.kind in ("text", "bytes") else 0

    @property
    def shown(self) -> str:
        """A short text for messages, without the user name and password of a URL."""
        if self.kind == "picture":
            return "a PIL image"
        if self.kind == "bytes":
            return f"{self.num_bytes} bytes"
        text = re.sub(r"(?<=://)[^/?#]*@", "...@", str(self.value)) if self.kind == "web" else str(self.value)
        if self.kind == "text" and (text.startswith("data:") or len(text) > MAX_PATH):
            return f"{text[:20]!r}..., {len(text)} characters"
        return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}...{text[-_SHOWN // 2 :]}")


class SourceBytes(NamedTuple):
    """The bytes of an image.

    size: (width, height) if ``data`` is RGB bytes; (0, 0) if it is an image file.
    """

    data: bytes
    digest: bytes
    size: tuple[int, int] = (0, 0)


@runtime_checkable
class Picture(Protocol):
    """The used part of ``PIL.Image.Image``."""

    @property
    def size(self) -> tuple[int, int]: ...


def image_source(name: str, value: object) -> ImageSource:
    """Check one image of a caller. Raises TypeError or ValueError."""
    if isinstance(value, str):
        text = str.__str__(value).strip()
        if not text:
            raise ValueError(f"{name} is empty; give {ALLOWED}")
        if text[:8].lower().startswith(_WEB):
            if len(text) > MAX_URL:
                raise ValueError(f"{name} is a URL of {len(text)} characters; at most {MAX_URL} are allowed")
            return ImageSource("web", checks.text(name, text))
        return ImageSource("text", text)
    if isinstance(value, bytes | bytearray | memoryview):
        return ImageSource("bytes", bytes(cast("bytes", value)))
    if isinstance(value, os.PathLike):
        path = os.fspath(cast("os.PathLike[str] | os.PathLike[bytes]", value))
        return ImageSource("path", os.fsdecode(path))
    pillow = sys.modules.get("PIL.Image")  # imported already if the value is an image of Pillow
    if pillow is not None and isinstance(value, pillow.Image):
        return ImageSource("picture", value)
    raise checks.wrong_type(name, f"{ALLOWED} (of an open file read(), of an array PIL.Image.fromarray(array))", value)


def part_source(name: str, part: Mapping[str, object]) -> ImageSource | None:
    """Return the image of a part of a message; None if ``image_data`` has it.

    ``{"type": "image", "image": ...}``, also with "url", "path" or "base64", or
    ``{"type": "image_url", "image_url": {"url": ...}}``. Raises TypeError or ValueError.
    """
    if part["type"] == "image_url":
        url = part.get("image_url")
        if isinstance(url, Mapping):
            url = cast("Mapping[object, object]", url).get("url")
        if not isinstance(url, str):
            raise checks.wrong_type(f"image_url of {name}", 'a URL, or a dict {"url": ...}', part.get("image_url"))
        return image_source(f"the URL of {name}", url)
    if unknown := sorted(map(str, part.keys() - {"type", *CONTENT})):
        raise ValueError(f"{name} has {checks.cut(', '.join(unknown))}; give an image as one of {', '.join(CONTENT)}")
    keys = [key for key in CONTENT if part.get(key) is not None]
    if len(keys) > 1:
        raise ValueError(f"{name} has both {keys[0]} and {keys[1]}; give one of them")
    return image_source(f"the {keys[0]} of {name}", part[keys[0]]) if keys else None


# ---------------------------------------------------------------- image_data


class GivenImages:
    """``image_data`` of a call.

    For one prompt: an image or a list of images. For a batch: one image for all prompts, or a list with one entry per
    prompt, which is an image, a list of images, or None.
    """

    def __init__(self, value: object, *, is_batch: bool, num_prompts: int) -> None:
        """Raises ValueError if a list for a batch does not have one entry per prompt."""
        self._is_per_prompt = is_batch and isinstance(value, list | tuple)
        self._entries: list[object] = list(cast("Sequence[object]", value)) if self._is_per_prompt else [value]
        self._known: dict[int, tuple[ImageSource, ...]] = {}
        if self._is_per_prompt and len(self._entries) != num_prompts:
            entries = checks.counted(len(self._entries), "entry", "entries")
            prompts = checks.counted(num_prompts, "prompt")
            raise ValueError(f"image_data has {entries} for {prompts}; give one for each, or one image for all")

    def has_images(self, prompt: int) -> bool:
        return not _is_none(self._entries[prompt if self._is_per_prompt else 0])

    @property
    def num_bytes(self) -> int:
        """Memory that the checked images take in the caller's process."""
        return sum(source.num_bytes for sources in self._known.values() for source in sources)

    def of(self, prompt: int, max_images: int) -> tuple[ImageSource, ...]:
        """Check and return the images of a prompt. Raises TypeError or ValueError."""
        key = prompt if self._is_per_prompt else 0
        if key not in self._known:
            name = f"image_data[{prompt}]" if self._is_per_prompt else "image_data"
            self._known[key] = _sources(name, self._entries[key], max_images)
        return self._known[key]


def given_images(value: object, *, is_batch: bool, num_prompts: int) -> GivenImages | None:
    """Return ``image_data`` of a call; None if no prompt has an image. Raises ValueError as ``GivenImages``."""
    if _is_none(value) and not (is_batch and value):  # a list for a batch must have an entry per prompt
        return None
    images = GivenImages(value, is_batch=is_batch, num_prompts=num_prompts)
    has_any = any(images.has_images(prompt) for prompt in range(num_prompts))
    return images if has_any else None


def _is_none(value: object) -> bool:
    """Whether the value means no image: None, an empty list or ``[None]``."""
    if not isinstance(value, list | tuple):
        return value is None
    entries = cast("Sequence[object]", value)
    return not entries or (len(entries) == 1 and entries[0] is None)


def _sources(name: str, value: object, max_images: int) -> tuple[ImageSource, ...]:
    if _is_none(value):
        return ()
    entries = cast("Sequence[object]", value) if isinstance(value, list | tuple) else [value]
    check_number(name, len(entries), max_images)
    if len(entries) == 1:
        return (image_source(name, entries[0]),)
    return tuple(image_source(f"{name}[{number}]", entry) for number, entry in enumerate(entries))


def check_number(name: str, count: int, max_images: int) -> None:
    """Raise ValueError for more images than a prompt may have."""
    if count > max_images:
        images = checks.counted(count, "image")
        raise ValueError(f"{name} has {images}; the limit is max_images_per_prompt={max_images}")


# ---------------------------------------------------------------- reading, on a thread


def read_source(source: ImageSource, limits: MediaConfig) -> SourceBytes:
    """Return the bytes of an image that needs no download.

    Raises ValueError if they cannot be read. The message is the end of a sentence about the image.
    """
    if source.kind == "picture":
        return _read_picture(source.value, limits)
    if source.kind == "bytes":
        data = cast("bytes", source.value)
    elif source.kind == "path":
        data = read_file(cast("str", source.value), limits)
    else:
        data = _read_text(cast("str", source.value), limits)
    _check_length(len(data), limits)
    return SourceBytes(data, hashlib.sha256(data).digest())


def _read_picture(value: object, limits: MediaConfig) -> SourceBytes:
    from aioengine.media import pictures  # imports Pillow, which is loaded: the value is an image of it

    picture = cast("pictures.PillowImage", value)
    pictures.check_pixels(picture, limits.max_image_pixels)
    with _DECODING[id(picture) % len(_DECODING)]:
        rgb = pictures.decode(picture)
    data = rgb.tobytes()
    return SourceBytes(data, hashlib.sha256(b"RGB %d %d " % rgb.size + data).digest(), rgb.size)


def _read_text(text: str, limits: MediaConfig) -> bytes:
    if text[:5].lower() == "data:":
        return _read_data_url(text, limits)
    if text[:5].lower() == "file:":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"its file: URL names the host {parts.netloc!r:.80}; write file:///path")
        return read_file(unquote(parts.path), limits)
    if len(text) <= MAX_PATH and _is_readable(text, limits):
        return read_file(text, limits)
    data = _decoded(text, limits)
    if data is None or len(data) < _MIN_PICTURE:  # most file names without a dot are valid base64
        folder = limits.allowed_local_media_path
        file = "file that exists" if folder is None else f"file in allowed_local_media_path={folder!r}"
        raise ValueError(f"it is neither a {file}, nor a URL (http, https, file, data), nor base64")
    return data


def _is_readable(path: str, limits: MediaConfig) -> bool:
    """Whether the file exists in the allowed folder. Clients cannot find out which files exist elsewhere."""
    try:
        real = os.path.realpath(os.path.expanduser(path))
        return _is_allowed(real, limits) and os.path.exists(real)
    except (OSError, ValueError):  # the working folder is gone; a null character
        return False


def _read_data_url(text: str, limits: MediaConfig) -> bytes:
    head, comma, body = text.partition(",")
    if not comma:
        raise ValueError("its data: URL has no comma before the data")
    if not head.lower().endswith(";base64"):
        _check_length(len(body) // 3, limits)
        return unquote_to_bytes(body)
    _check_length(len(body) // 4 - _SLACK, limits)  # before unquoting: the least size, if all of it is %XX
    data = _decoded(unquote(body) if "%" in body[:_SLACK] else body, limits)
    if data is None:
        raise ValueError("the data of its data: URL is not base64")
    return data


def _decoded(text: str, limits: MediaConfig) -> bytes | None:
    _check_length(len(text) // 4 * 3 - _SLACK, limits)
    try:
        compact = text.encode("ascii").translate(_URL_SAFE, b" \t\r\n\v\f")
        return base64.b64decode(compact + b"=" * (-len(compact) % 4), validate=True)
    except ValueError:
        return None


def read_file(path: str, limits: MediaConfig) -> bytes:
    """Return the bytes of a file.

    Raises ValueError if it is outside the allowed folder, not a regular file, or too large.
    """
    path = os.path.expanduser(path)
    try:
        _check_allowed(os.path.realpath(path), limits)  # first, so that the error does not tell whether it exists
        real = os.path.realpath(path, strict=True)
        _check_allowed(real, limits)
        # The file may have been replaced by a link, which is not followed, or a pipe, which must not block.
        fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is not a regular file")
            if limits.allowed_local_media_path is not None:  # parent folders may have become links
                now = os.path.realpath(real, strict=True)
                _check_allowed(now, limits)
                if not os.path.samestat(os.stat(now), status):
                    raise ValueError("its file was replaced while it was opened")
            _check_length(status.st_size, limits)
            return file.read(limits.max_image_bytes + 1)
    except OSError as error:
        raise ValueError(f"its file cannot be read: {error.strerror or error}") from None


def _check_allowed(real: str, limits: MediaConfig) -> None:
    if not _is_allowed(real, limits):
        raise ValueError(f"its file is not in allowed_local_media_path={limits.allowed_local_media_path!r}")


def _is_allowed(real: str, limits: MediaConfig) -> bool:
    folder = limits.allowed_local_media_path
    return folder is None or Path(real).is_relative_to(os.path.realpath(folder))


def _check_length(num_bytes: int, limits: MediaConfig) -> None:
    if num_bytes > limits.max_image_bytes:
        raise ValueError(f"it has {num_bytes} bytes, and max_image_bytes={limits.max_image_bytes} are allowed")
