"""The media process: downloads, decodes and prepares the images of prompts.

Image decoders are large and read untrusted data. If one crashes here, only the images in this process fail. If one
hangs, only its image does.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import hashlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import numpy.typing as npt
from PIL import Image
from safetensors.numpy import save_file

from aioengine.child_process.host import die_with_parent, handle_signals, limit_threads, name_process, read_orders
from aioengine.errors import describe
from aioengine.media import pictures
from aioengine.media.service.processors import Preprocess, load_processor
from aioengine.media.service.resizing import DeviceResize
from aioengine.media.tokens._base import ImageShape
from aioengine.protocol.media import (
    Broken,
    CancelJob,
    Cancelled,
    Fetched,
    FetchJob,
    JobEnd,
    JobWaiting,
    MediaJob,
    MediaOrders,
    MediaReady,
    PreparedImage,
    PrepareJob,
    Refused,
    decode_job,
    decode_media_orders,
    encode_line,
)

if TYPE_CHECKING:
    from aioengine.media.service.download import Downloader

MAX_LINE: Final = 1 << 20
"""Maximum bytes of a message. Only URLs and paths are long."""


class PixelLimit:
    """Limits the pixels of pictures that are decoded at a time to ``max_pixels``. Larger ones are decoded alone."""

    def __init__(self, max_pixels: int) -> None:
        self._max_pixels = max_pixels
        self._num_pixels = 0
        self._queue: deque[object] = deque()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def holding(self, num_pixels: int, report: Callable[[bool], None]) -> Iterator[None]:
        """Enter in order of the calls. ``report`` is called with False if the picture must wait, and then with True."""
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            if not self._may_enter(ticket, num_pixels):
                report(False)
                self._changed.wait_for(lambda: self._may_enter(ticket, num_pixels))
                report(True)
            self._queue.popleft()
            self._num_pixels += num_pixels
            self._changed.notify_all()  # the next one may be small
        try:
            yield
        finally:
            with self._changed:
                self._num_pixels -= num_pixels
                self._changed.notify_all()

    def _may_enter(self, ticket: object, num_pixels: int) -> bool:
        fits = not self._num_pixels or self._num_pixels + num_pixels <= self._max_pixels
        return fits and self._queue[0] is ticket


class MediaWorker:
    """Does jobs. On one event loop."""

    def __init__(self, orders: MediaOrders, processor: Preprocess, device_resize: DeviceResize | None = None) -> None:
        """device_resize: None if the processor prepares all pictures."""
        self._orders = orders
        self._processor = processor
        self._device_resize = device_resize
        self._threads = ThreadPoolExecutor(orders.num_workers, "prepare")
        self._pixel_limit = PixelLimit(orders.limits.max_image_pixels)
        self._cancels: dict[int, Callable[[], object]] = {}

    async def do(self, job: MediaJob, report: Callable[[JobWaiting], None]) -> JobEnd:
        """Do a job, and return how it ended. ``report`` is called from threads before that."""
        loop = asyncio.get_running_loop()
        try:
            if isinstance(job, FetchJob):
                download = asyncio.ensure_future(self._downloader.fetch(job.url))
                self._cancels[job.id] = download.cancel
                body = await download
                del self._cancels[job.id]
                await loop.run_in_executor(self._threads, Path(job.path).write_bytes, body)
                return Fetched(job.id, hashlib.sha256(body).hexdigest())
            is_cancelled = threading.Event()
            self._cancels[job.id] = is_cancelled.set
            return await loop.run_in_executor(self._threads, self._prepare, job, is_cancelled, report)
        except asyncio.CancelledError:
            return Cancelled(job.id)
        except ValueError as error:
            return Refused(job.id, str(error))
        except Exception as error:
            return Broken(job.id, describe(error))
        finally:
            self._cancels.pop(job.id, None)

    def cancel(self, number: int) -> None:
        """End a job early if it has begun and is not over."""
        if (cancel := self._cancels.get(number)) is not None:
            cancel()

    @cached_property
    def _downloader(self) -> Downloader:
        from aioengine.media.service.download import Downloader  # httpx is only needed for downloads

        return Downloader(self._orders.limits)

    def _prepare(self, job: PrepareJob, is_cancelled: threading.Event, report: Callable[[JobWaiting], None]) -> JobEnd:
        """Run on a thread."""
        with Path(job.source).open("rb") as file:
            if job.size != (0, 0):
                image = Image.frombytes("RGB", job.size, file.read())
            else:
                image = pictures.open_picture(file, self._orders.limits.max_image_pixels)
            with self._pixel_limit.holding(
                image.width * image.height, lambda is_over: report(JobWaiting(job.id, is_over))
            ):
                if is_cancelled.is_set():
                    return Cancelled(job.id)
                pixels = np.asarray(pictures.decode(image))
                arrays = None if self._device_resize is None else self._device_resize.arrays(*pixels.shape[:2])
                arrays = self._processed(pixels) if arrays is None else {"picture": pixels, **arrays}
                tensors = {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}
                save_file(tensors, job.path)
                num_bytes = sum(array.nbytes for array in tensors.values())
                return PreparedImage(job.id, _shape(arrays), num_bytes)

    def _processed(self, pixels: npt.NDArray[np.uint8]) -> dict[str, object]:
        """Run the image processor on an RGB picture [height, width, 3]. Raises ValueError if it refuses the picture."""
        options = {"do_convert_rgb": False, **self._orders.options}
        arrays = dict(self._processor(pixels, input_data_format="channels_last", return_tensors="np", **options))
        mask = arrays.get("pixel_attention_mask")
        if isinstance(mask, np.ndarray):
            arrays["pixel_attention_mask"] = mask.astype(np.bool_)  # zeros and ones: an eighth of the bytes
        return {
            name: np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value
            for name, value in arrays.items()
        }


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


def main() -> None:
    faulthandler.enable()
    handle_signals()
    orders = decode_media_orders(read_orders())
    name_process("aioengine:media")
    die_with_parent(orders.parent_pid)
    limit_threads(1)
    pictures.limit_pixels(orders.limits.max_image_pixels)
    processor, device_resize = load_processor(orders)
    Image.init()  # load the decoders before the first image
    channel = socket.socket(fileno=orders.socket_fd)
    with contextlib.suppress(SystemExit, OSError):  # asked to end, or the frontend has exited
        asyncio.run(_serve(channel, MediaWorker(orders, processor, device_resize)))
    os._exit(0)


async def _serve(channel: socket.socket, worker: MediaWorker) -> None:
    loop = asyncio.get_running_loop()
    channel.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=channel, limit=MAX_LINE)
    tasks: set[asyncio.Task[None]] = set()

    def send(reply: MediaReady | JobWaiting | JobEnd) -> None:
        writer.write(encode_line([reply]))

    def report(waiting: JobWaiting) -> None:
        loop.call_soon_threadsafe(send, waiting)

    async def do(job: MediaJob) -> None:
        send(await worker.do(job, report))

    send(MediaReady())
    while line := await reader.readline():
        job = decode_job(line)
        if isinstance(job, CancelJob):
            worker.cancel(job.id)
            continue
        tasks.add(task := asyncio.create_task(do(job)))
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(0)  # start the job before the next line is read, which may cancel it
