"""Messages between the frontend and the media process: one JSON object per line, over a pair of sockets.

frontend --> media process      MediaOrders (first), then FetchJob, PrepareJob, and CancelJob for a job in progress
media process --> frontend      MediaReady (first), JobWaiting, and one ``JobEnd`` per job
"""

from __future__ import annotations

from typing import Final

import msgspec

from aioengine.media.tokens._base import ImageShape
from aioengine.settings.config import MediaConfig

RESIZE_BITS: Final = 22
"""Fractional bits of the weights with which a device resizes an image."""


class MediaOrders(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a media process. Its start sets ``parent_pid`` and ``socket_fd``.

    processor: the image processor of transformers, "module:class". settings: its fields. options: of its calls.
    limits: ``max_image_pixels`` is the limit for one image, and for the sum of the images that are decoded at a time.
    num_workers: number of images that are prepared at a time.
    resizes_on_device: images are resized on the device if that gives the same bits.
    """

    parent_pid: int = 0
    socket_fd: int = -1
    processor: str
    settings: dict[str, object]
    options: dict[str, bool]
    limits: MediaConfig
    num_workers: int
    resizes_on_device: bool = False


class FetchJob(msgspec.Struct, tag="fetch", frozen=True):
    """Download ``url`` to the file ``path``."""

    id: int
    url: str
    path: str


class PrepareJob(msgspec.Struct, tag="prepare", frozen=True):
    """Decode the image in the file ``source``, prepare it for the model, and write the arrays to the file ``path``.

    ``size``: (width, height) if the source is RGB bytes; (0, 0) if it is an image file.
    """

    id: int
    source: str
    path: str
    size: tuple[int, int] = (0, 0)


class CancelJob(msgspec.Struct, tag="cancel", frozen=True):
    """End this job early. It ends with ``Cancelled``, or as usual if it is too late."""

    id: int


class MediaReady(msgspec.Struct, tag="ready", frozen=True):
    """The media process accepts jobs."""


class JobWaiting(msgspec.Struct, tag="waiting", frozen=True):
    """The job waits for other jobs, or (``is_over``) continues. This time does not count for its timeout."""

    id: int
    is_over: bool = False


class Fetched(msgspec.Struct, tag="fetched", frozen=True):
    """The download is complete. ``digest``: sha256 of the body, in hexadecimal."""

    id: int
    digest: str


class PreparedImage(msgspec.Struct, tag="prepared", frozen=True):
    """The image is prepared. ``num_bytes``: size of the arrays in the file."""

    id: int
    shape: ImageShape
    num_bytes: int


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The image or its URL is invalid. ``reason`` is the end of a sentence about the image."""

    id: int
    reason: str


class Broken(msgspec.Struct, tag="broken", frozen=True):
    """The media process failed, for a reason that is not the image."""

    id: int
    reason: str


class Cancelled(msgspec.Struct, tag="cancelled", frozen=True):
    """The frontend cancelled the job."""

    id: int


MediaJob = FetchJob | PrepareJob
JobEnd = Fetched | PreparedImage | Refused | Broken | Cancelled

encode_line = msgspec.json.Encoder().encode_lines
decode_job = msgspec.json.Decoder(MediaJob | CancelJob).decode
decode_reply = msgspec.json.Decoder(MediaReady | JobWaiting | JobEnd).decode
decode_media_orders = msgspec.json.Decoder(MediaOrders).decode
