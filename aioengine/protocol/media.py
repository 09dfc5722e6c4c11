"""Messages between the frontend and the media process: one JSON object a line, over a pair of sockets.

frontend --> media process      MediaOrders (first), then FetchJob, PrepareJob, and CancelJob for one that is not over
media process --> frontend      MediaReady (first), Waits, and for each job one of ``JobEnd``
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from aioengine.media.tokens._base import ImageShape

NUM_FETCHES: Final = 16
"""Downloads at a time: they wait for the network, beside the images that are prepared."""

RESIZE_BITS: Final = 22
"""Of the weights by which a device resizes a picture, behind the point."""


class MediaOrders(Struct, frozen=True, kw_only=True):
    """The settings of a media process.

    processor: the image processor of transformers, "module:class". settings: its fields. options: of its calls.
    num_workers: images that it prepares at a time. max_pixels: of one image, and together of those that are decoded.
    leaves_resizing: pictures are resized where the model runs, where it gets the same bits.
    """

    parent_pid: int
    socket_fd: int
    processor: str
    settings: dict[str, object]
    options: dict[str, bool]
    max_bytes: int
    max_pixels: int
    timeout_s: float
    allows_private: bool
    num_workers: int
    leaves_resizing: bool = False


class FetchJob(Struct, tag="fetch", frozen=True):
    """Write what is at ``url`` to the file ``path``."""

    id: int
    url: str
    path: str


class PrepareJob(Struct, tag="prepare", frozen=True):
    """Decode the picture in the file ``source``, and write what the image processor makes of it to the file ``path``.

    ``size``: (width, height) of a picture that is RGB bytes; (0, 0): it is a picture file.
    """

    id: int
    source: str
    path: str
    size: tuple[int, int] = (0, 0)


class CancelJob(Struct, tag="cancel", frozen=True):
    """Nobody waits for this job any more. It ends soon, cancelled or as it would have."""

    id: int


class MediaReady(Struct, tag="ready", frozen=True):
    """It takes jobs."""


class Waits(Struct, tag="waits", frozen=True):
    """The job waits for others to end, or (``is_over``) goes on. The time between is none of its own."""

    id: int
    is_over: bool = False


class Fetched(Struct, tag="fetched", frozen=True):
    """``digest``: sha256 of the body, in hexadecimal."""

    id: int
    digest: str


class Prepared(Struct, tag="prepared", frozen=True):
    """``num_bytes``: of the file that was written."""

    id: int
    shape: ImageShape
    num_bytes: int


class Refused(Struct, tag="refused", frozen=True):
    """The picture, or where it should be, is wrong: why, as the end of a sentence about it."""

    id: int
    reason: str


class Broken(Struct, tag="broken", frozen=True):
    """The image cannot be prepared here, whatever it is like."""

    id: int
    reason: str


class Cancelled(Struct, tag="cancelled", frozen=True):
    """By the frontend."""

    id: int


Job = FetchJob | PrepareJob
JobEnd = Fetched | Prepared | Refused | Broken | Cancelled

encode_line = msgspec.json.Encoder().encode_lines
decode_job = msgspec.json.Decoder(Job | CancelJob).decode
decode_reply = msgspec.json.Decoder(MediaReady | Waits | JobEnd).decode
decode_media_orders = msgspec.json.Decoder(MediaOrders).decode
