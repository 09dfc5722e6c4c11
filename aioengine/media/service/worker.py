"""Downloads, decodes and prepares the images of prompts, in the media process.

Image decoders are large and read untrusted data. If one crashes or hangs here, only the images in this process fail.
The image processors of transformers are imported in the variants that need only Pillow; torch is not imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import sys
import threading
from collections import deque
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from PIL import Image

from aioengine.errors import describe
from aioengine.media import pictures
from aioengine.media.service import resampling
from aioengine.media.service.array_files import reserve, write_arrays
from aioengine.media.service.download import Cancellation, WebLimits, fetch
from aioengine.media.service.image_arrays import LatePictures, faster
from aioengine.media.service.picture_bytes import STORED_BYTES, bytes_of
from aioengine.media.service.picture_files import SpareFiles, fits_in_file
from aioengine.media.tokens._base import ImageShape
from aioengine.protocol.media import (
    Broken,
    Cancelled,
    Fetched,
    FetchJob,
    MediaOrders,
    Prepared,
    PrepareJob,
    Refused,
    Waits,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sized
    from types import ModuleType

    import numpy.typing as npt

    from aioengine.protocol.media import Job, JobEnd

    Bytes = npt.NDArray[np.uint8]


class Preprocess(Protocol):
    """An image processor of transformers."""

    def __call__(
        self, images: Bytes, *, input_data_format: str, return_tensors: str, **options: bool
    ) -> Mapping[str, object]: ...


class PixelGate:
    """Lets pictures be decoded while all of them together have at most ``max_pixels``, or one by one, in order."""

    def __init__(self, max_pixels: int) -> None:
        self._max_pixels = max_pixels
        self._num_pixels = 0
        self._line: deque[object] = deque()
        self._freed = threading.Condition()

    @contextlib.contextmanager
    def holding(self, num_pixels: int, waits: Callable[[bool], None]) -> Iterator[None]:
        """``waits`` is called with False where the picture must wait, and with True when that is over."""
        place = object()
        with self._freed:
            self._line.append(place)
            if not self._is_open(place, num_pixels):
                waits(False)
                self._freed.wait_for(lambda: self._is_open(place, num_pixels))
                waits(True)
            self._line.popleft()
            self._num_pixels += num_pixels
            self._freed.notify_all()  # the next one may be small
        try:
            yield
        finally:
            with self._freed:
                self._num_pixels -= num_pixels
                self._freed.notify_all()

    def _is_open(self, place: object, num_pixels: int) -> bool:
        has_room = not self._num_pixels or self._num_pixels + num_pixels <= self._max_pixels
        return has_room and self._line[0] is place


class MediaWorker:
    """Does jobs. From any thread.

    Attributes:
        spares: files for the next pictures; ``spares.make`` is to be called when a job has ended.
    """

    def __init__(self, orders: MediaOrders, processor: Preprocess, late: LatePictures | None = None) -> None:
        """late: for pictures that the device resizes."""
        self._limits = WebLimits(orders.max_bytes, orders.timeout_s, orders.allows_private)
        self._options = orders.options
        self._max_pixels = orders.max_pixels
        self._processor = processor
        self._late = late
        self._expecting_threads = futures.ThreadPoolExecutor(orders.num_workers, "expect")
        self._gate = PixelGate(orders.max_pixels)
        self._expected_size = 0, 0  # of the last picture: what its size is needed for is known
        self.spares = SpareFiles()
        self._accepted: dict[int, Cancellation] = {}

    def accept(self, job: Job) -> None:
        """Let a job be cancelled from now on."""
        self._accepted[job.id] = Cancellation()

    def cancel(self, number: int) -> None:
        """End a job early, if it is not over."""
        cancellation = self._accepted.get(number)
        if cancellation is not None:
            cancellation.cancel()

    def do(self, job: Job, report: Callable[[Waits], None]) -> JobEnd:
        """``report`` gets the messages that come before the end."""
        cancellation = self._accepted[job.id]
        try:
            if isinstance(job, FetchJob):
                return self._fetch(job, cancellation)
            return self._prepare(job, cancellation, report)
        except _CancelledError:
            return Cancelled(job.id)
        except ValueError as error:
            return Cancelled(job.id) if cancellation.is_cancelled else Refused(job.id, str(error))
        except Exception as error:
            return Broken(job.id, describe(error))
        finally:
            del self._accepted[job.id]

    def _fetch(self, job: FetchJob, cancellation: Cancellation) -> Fetched:
        _check(cancellation)
        body = fetch(job.url, self._limits, cancellation)
        Path(job.path).write_bytes(body)
        return Fetched(job.id, hashlib.sha256(body).hexdigest())

    def _prepare(self, job: PrepareJob, cancellation: Cancellation, report: Callable[[Waits], None]) -> Prepared:
        _check(cancellation)
        with Path(job.source).open("rb") as file:
            if job.size != (0, 0):
                image = Image.frombytes("RGB", job.size, file.read())
            else:
                image = pictures.open_picture(file, self._max_pixels)
            with self._gate.holding(image.width * image.height, lambda is_over: report(Waits(job.id, is_over))):
                _check(cancellation)
                return self._prepare_opened(image, job, cancellation)

    def _prepare_opened(self, image: Image.Image, job: PrepareJob, cancellation: Cancellation) -> Prepared:
        is_suitable = self._late is not None and fits_in_file(image)
        num_bytes = STORED_BYTES * image.width * image.height
        file = self.spares.take(num_bytes) if is_suitable else None
        try:
            if file is not None:
                file.offer(image)
            with self._expecting(image, job.path if file is None else ""):
                decoded = pictures.decode(image)
            _check(cancellation)
            stored = None if file is None else file.bytes_of(decoded)
            arrays = self._late_arrays(decoded, stored) or self._arrays(np.asarray(decoded))
            found = {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}
            if is_suitable and "picture" in found:
                self.spares.want(os.path.dirname(job.path), num_bytes)
            if file is not None and stored is not None and "picture" in found:
                written = file.finish(job.path, found)
            else:
                written = write_arrays(job.path, found)
            return Prepared(job.id, _shape(arrays), written)
        finally:
            if file is not None:
                self.spares.give_back(file)

    @contextlib.contextmanager
    def _expecting(self, image: Image.Image, path: str) -> Iterator[None]:
        """While a picture is decoded inside, do what its size alone is needed for, on another thread. path: where its
        file will be; "": that is there.
        """
        if self._late is None or (not path and image.size == self._expected_size):
            yield
            return
        expected = self._expecting_threads.submit(_expect, self._late, image.size, path)
        try:
            yield
        finally:
            futures.wait([expected])
        expected.result()
        self._expected_size = image.size

    def _late_arrays(self, image: Image.Image, stored: Bytes | None) -> dict[str, object]:
        """A picture as it is, with what the device needs to resize it; empty where that is done here. Raises ValueError
        as ``_arrays`` does. stored: its bytes where they are in its file.
        """
        beside = None if self._late is None else self._late.beside(image.height, image.width)
        return {} if beside is None else {"picture": bytes_of(image) if stored is None else stored, **beside}

    def _arrays(self, image: Bytes) -> dict[str, object]:
        """What the image processor makes of a picture [height, width, 3], by its names.

        Raises ValueError where it refuses the picture.
        """
        options = {"do_convert_rgb": False, **self._options}  # it is RGB
        found = dict(self._processor(image, input_data_format="channels_last", return_tensors="np", **options))
        mask = found.get("pixel_attention_mask")
        if isinstance(mask, np.ndarray):
            found["pixel_attention_mask"] = mask.astype(np.bool_)  # of zeros and ones: an eighth of the bytes
        return {
            name: np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value
            for name, value in found.items()
        }


def _expect(late: LatePictures, size: tuple[int, int], path: str) -> None:
    """For a picture of this size (width, height), whose file will be at ``path``; "": it is there. Raises ValueError as
    ``beside``.
    """
    width, height = size
    if late.beside(height, width) is not None and path:
        reserve(path, STORED_BYTES * width * height)


class _CancelledError(Exception):
    """Nobody waits for this job any more."""


def _check(cancellation: Cancellation) -> None:
    if cancellation.is_cancelled:
        raise _CancelledError


def _shape(arrays: Mapping[str, object]) -> ImageShape:
    if "picture" in arrays:
        height, width = (len(cast("Sized", arrays[f"{name}_starts"])) for name in ("row", "column"))
    else:
        pixels = arrays.get("pixels", arrays.get("pixel_values"))
        height, width = cast("np.ndarray[tuple[int, ...], np.dtype[np.uint8 | np.float32]]", pixels).shape[-2:]
    grid = cast("np.ndarray[tuple[int, int], np.dtype[np.int64]] | None", arrays.get("image_grid_thw"))
    frames, grid_height, grid_width = (0, 0, 0) if grid is None else map(int, grid[0])
    rows, columns = (int(np.asarray(arrays.get(name, 0)).ravel()[0]) for name in ("rows", "cols"))
    return ImageShape(int(height), int(width), (frames, grid_height, grid_width), (rows, columns))


def load_processor(orders: MediaOrders) -> tuple[Preprocess, LatePictures | None]:
    """The image processor of the model, and what it does to pictures that the device resizes, where that is known."""
    # transformers imports torch wherever it finds it, which takes seconds, and these processors do not use it.
    if "torch" not in sys.modules:
        sys.modules["torch"] = cast("ModuleType", None)
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # else its advice is the last line of a process that is lost
    module_name, _, name = orders.processor.partition(":")
    module = importlib.import_module(module_name)
    kind, rows_first = getattr(module, name), resampling.find_order() if orders.leaves_resizing else None
    late = None
    if rows_first is not None and hasattr(kind, "patchify"):
        late = LatePictures(kind, orders.settings, module.smart_resize, rows_first)
    return faster(kind).from_dict(dict(orders.settings)), late
