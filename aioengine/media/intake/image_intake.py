"""Images on their way from a call to the scheduler: read, prepared in the media process, kept as files by content.

Everything here runs on the engine's loop and never waits; files are read, written and removed on threads. An image that
was prepared before, and is still there, costs a hash of its bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import tempfile
import threading
from collections import OrderedDict, deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import msgspec

from aioengine.errors import EngineOverloadedError, RequestError, describe
from aioengine.media.intake.media_jobs import MediaProcess
from aioengine.media.intake.sources import read_source
from aioengine.media.tokens._base import ImageShape
from aioengine.protocol.media import (
    NUM_FETCHES,
    Broken,
    Cancelled,
    Fetched,
    FetchJob,
    JobEnd,
    MediaOrders,
    Prepared,
    PrepareJob,
    Refused,
)
from aioengine.supervision.tasks import WorkerThread, post
from aioengine.transport.addresses import MEDIA_SUFFIX, SHARED_MEMORY, PrivateDirectory, remove_stale

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from aioengine.media.intake.sources import ImageSource
    from aioengine.media.tokens._base import ImageModel

NUM_READERS: Final = 4
MAX_WORKERS: Final = 16
MAX_KEPT_BYTES: Final = 1 << 28
"""Of files that no request uses; the least recently used go first. Less where the disk is small."""

MAX_KEPT_FILES: Final = 2048
"""Of these: all files are looked at for each image, on the loop."""

KEPT_SHARE: Final = 4
"""They take at most 1 / ``KEPT_SHARE`` of what is free when their folder is made."""

MAX_USED_BYTES: Final = 1 << 31
"""Of files that requests use: beyond it, images of further prompts wait."""

MAX_SESSION_BYTES: Final = 1 << 31
"""Of files that open sessions keep."""

MIN_SHARED_BYTES: Final = 1 << 33
"""Of shared memory that is free, for files to be there: much more than they take."""

STAGE: Final = "image"

ImageError = ValueError | RequestError


class ImageFile(msgspec.Struct):
    """A prepared image, or one that is being prepared.

    Attributes:
        content: sha256 of its bytes and of how they are prepared. shape: None until it is prepared.
        num_users: prompts that need it. num_sessions: open sessions that have it in a turn.
        waiters: what waits until it is prepared; empty: it is not being prepared.
    """

    content: bytes
    path: str
    shape: ImageShape | None = None
    num_bytes: int = 0
    num_users: int = 0
    num_sessions: int = 0
    waiters: list[_Unit] = []


class _Read(NamedTuple):
    """An image that was read. source: the file with its bytes; "": it was there already, prepared."""

    content: bytes
    source: str
    size: tuple[int, int] = (0, 0)


class ImagesOfPrompt:
    """The images of one prompt while they are read and prepared, and until the prompt needs them no more.

    Attributes:
        files: in the order of the prompt. error: why one cannot be had.
    """

    def __init__(self, sources: Sequence[ImageSource], name: str) -> None:
        """``name``: " of prompt 3" in a batch, for messages."""
        self.sources = sources
        self.files: list[ImageFile | None] = [None] * len(sources)
        self.error: ImageError | None = None
        self.is_released = False
        self._name = name
        self._done: Callable[[], None] | None = None
        self._num_missing = len(sources)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is needed of its images."""
        return self.is_released or self.error is not None

    @property
    def has_begun(self) -> bool:
        return any(file is not None for file in self.files)

    @property
    def prepared(self) -> list[ImageFile]:
        return [file for file in self.files if file is not None]

    def when_over(self, done: Callable[[], None]) -> None:
        """Call ``done`` when all are prepared, or one cannot be; now where that is so. Never after the release."""
        if self.error is not None or not self._num_missing:
            done()
        else:
            self._done = done

    def end(self, place: int, found: ImageFile | ImageError) -> None:
        """The image at ``place`` of the prompt is prepared, or cannot be, which ends the whole prompt."""
        if self.is_over:
            return
        if isinstance(found, ImageFile):
            self._num_missing -= 1
            if self._num_missing:
                return
        else:
            about = f"image {place}{self._name} ({self.sources[place].shown})"
            if isinstance(found, RequestError):
                self.error = RequestError(STAGE, f"{about}: {found.cause}")
            else:
                self.error = ValueError(f"{about}: {found}")
        if self._done is not None:
            self._done()


class _Unit(NamedTuple):
    """One image of a prompt that is to be read and prepared."""

    prompt: ImagesOfPrompt
    place: int

    @property
    def source(self) -> ImageSource:
        return self.prompt.sources[self.place]

    @property
    def is_web(self) -> bool:
        return self.source.kind == "web"


class ImageIntake:
    """Reads, prepares and keeps images. On the engine's loop, but for ``close``.

    Attributes:
        model: whose images they are. files: by content, least recently used first.
    """

    def __init__(self, model: ImageModel, num_workers: int, *, is_for_gpu: bool = False) -> None:
        """is_for_gpu: the model runs on a GPU, which resizes pictures faster."""
        self.model = model
        self.files: OrderedDict[bytes, ImageFile] = OrderedDict()
        limits = self._limits = model.limits
        self._num_workers = min(MAX_WORKERS, num_workers)
        self._loop = asyncio.get_running_loop()
        self._num_session_bytes = 0
        self._max_kept_bytes = MAX_KEPT_BYTES
        # What is kept by the bytes of an image alone would be found again after its preparation has changed.
        self._salt = hashlib.sha256(
            msgspec.json.encode([model.processor, model.settings, dict(model.family.options)], order="deterministic")
        ).digest()
        self._folder: PrivateDirectory | None = None
        self._making_folder = threading.Lock()
        self._readers: list[WorkerThread[_Read]] = []
        self._next_reader = 0
        self._files_thread: WorkerThread[None] | None = None
        self._waiting: deque[_Unit] = deque()
        self._active = {True: 0, False: 0}  # units by ``is_web``
        self._jobs: dict[int, list[_Unit]] = {}  # what waits for the end of a job that was not cancelled, by its number
        self._numbers = itertools.count()
        self._is_closed = False
        self.process = MediaProcess(
            MediaOrders(
                parent_pid=0,
                socket_fd=-1,
                processor=model.processor,
                settings=model.settings,
                options=dict(model.family.options),
                max_bytes=limits.max_image_bytes,
                max_pixels=limits.max_image_pixels,
                timeout_s=limits.timeout_s,
                allows_private=limits.allow_private_urls,
                num_workers=self._num_workers,
                leaves_resizing=is_for_gpu,
            ),
            lambda: Path(self._place()),
        )

    def begin(self, prompt: ImagesOfPrompt) -> None:
        """Read and prepare the images of a prompt, and report to it when that is over, which it may be at once."""
        self._waiting.extend(_Unit(prompt, place) for place in range(len(prompt.sources)))
        self._loop.call_soon(self._go_on)

    def release(self, prompt: ImagesOfPrompt) -> None:
        """The prompt needs its images no more. Harmless when repeated."""
        if prompt.is_released:
            return
        prompt.is_released = True
        for file in prompt.prepared:
            file.num_users -= 1
        for number, units in list(self._jobs.items()):
            if all(unit.prompt.is_over for unit in units):
                del self._jobs[number]
                self.process.cancel(number)
        self._evict()
        self._go_on()

    def keep(self, contents: Iterable[bytes]) -> None:
        """A session has these prepared images in a turn, and did not have them before. Each ends with ``let_go``.

        Raises:
            EngineOverloadedError: the files of all sessions would be too large; none of these is kept.
        """
        files = [self.files[content] for content in contents]
        added = sum(file.num_bytes for file in files if not file.num_sessions)
        if added and self._num_session_bytes + added > MAX_SESSION_BYTES:
            raise EngineOverloadedError(
                f"the images of open sessions take {self._num_session_bytes} bytes, and {MAX_SESSION_BYTES} are kept "
                "at most; close some of them, or open them with a timeout"
            )
        self._num_session_bytes += added
        for file in files:
            file.num_sessions += 1

    def let_go(self, contents: Iterable[bytes]) -> None:
        """A session needs these images no more."""
        for content in contents:
            file = self.files[content]
            file.num_sessions -= 1
            if not file.num_sessions:
                self._num_session_bytes -= file.num_bytes
        self._evict()

    def close(self) -> None:
        """End the media process and remove all files, at once. From any thread; harmless when repeated."""
        self._is_closed = True
        self.process.close()
        threads, self._readers = self._readers, []
        for thread in threads:
            thread.close()
        if self._files_thread is not None:
            self._files_thread.close()
        with self._making_folder:
            folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()

    # ------------------------------------------------------------ one image after the other

    def _go_on(self) -> None:
        """Begin with images that wait, as many at a time as are worked on."""
        most = {True: NUM_FETCHES, False: self._num_workers + NUM_READERS}
        left: deque[_Unit] = deque()
        while self._waiting and not self._is_closed and any(self._active[kind] < most[kind] for kind in most):
            unit = self._waiting.popleft()
            if unit.prompt.is_over:
                continue
            if self._active[unit.is_web] >= most[unit.is_web] or not self._has_room(unit):
                left.append(unit)
                continue
            self._active[unit.is_web] += 1
            self._begin_unit(unit)
        self._waiting.extendleft(reversed(left))

    def _has_room(self, unit: _Unit) -> bool:
        """Whether there is room for more files, or this prompt has some, and would else wait with them for ever."""
        num_bytes = sum(file.num_bytes for file in self.files.values() if file.num_users)
        return num_bytes < MAX_USED_BYTES or unit.prompt.has_begun or not any(self._active.values())

    def _begin_unit(self, unit: _Unit) -> None:
        try:
            if unit.is_web:
                job = FetchJob(next(self._numbers), cast("str", unit.source.value), self._new_path("fetched"))
                self._jobs[job.id] = [unit]
                self.process.do(job, partial(self._fetched, unit, job))
            else:
                self._read(unit)
        except Exception as error:  # no thread, for example
            self._end_unit(unit, RequestError(STAGE, describe(error)))

    def _read(self, unit: _Unit) -> None:
        if not self._readers:
            self._readers = [WorkerThread(f"aioengine-images-{number}") for number in range(NUM_READERS)]
        self._next_reader = (self._next_reader + 1) % NUM_READERS
        reading = self._readers[self._next_reader].submit(partial(self._read_on_thread, unit.source))
        reading.add_done_callback(lambda found: post(self._loop, self._was_read, unit, found))

    def _read_on_thread(self, source: ImageSource) -> _Read:
        found = read_source(source, self._limits)
        content = self._content(found.digest)
        known = self.files.get(content)
        if known is not None and known.shape is not None and os.path.exists(known.path):
            return _Read(content, "")
        path = self._new_path("source")
        try:
            Path(path).write_bytes(found.data)
        except OSError:  # the disk is full, of this file too
            Path(path).unlink(missing_ok=True)
            raise
        return _Read(content, path, found.size)

    def _was_read(self, unit: _Unit, reading: Future[_Read]) -> None:
        if reading.cancelled():
            return  # closed
        error = reading.exception()
        if error is None:
            self._prepare(unit, reading.result())
        elif isinstance(error, ValueError):
            self._end_unit(unit, error)
        else:
            self._end_unit(unit, RequestError(STAGE, describe(error)))

    def _fetched(self, unit: _Unit, job: FetchJob, end: JobEnd) -> None:
        self._jobs.pop(job.id, None)
        if isinstance(end, Fetched):
            self._prepare(unit, _Read(self._content(bytes.fromhex(end.digest)), job.path))
        else:
            self._remove(job.path)
            self._end_unit(unit, _error_of(end))

    def _prepare(self, unit: _Unit, read: _Read) -> None:
        """Take the image that is there, or wait for it, or have it prepared: again, if others removed its file."""
        file = self.files.get(read.content)
        if file is not None and (file.waiters or not read.source or os.path.exists(file.path)):
            self.files.move_to_end(read.content)
            if read.source:
                self._remove(read.source)
            if unit.prompt.is_over or not file.waiters:
                self._end_unit(unit, file)
            else:
                file.waiters.append(unit)
            return
        if unit.prompt.is_over:
            self._remove(read.source)
            self._end_unit(unit, ValueError())
        elif not read.source:  # it was removed just now
            self._begin_unit(unit)
        else:
            if file is None:
                file = self.files[read.content] = ImageFile(read.content, "")
            file.path, file.waiters = self._new_path(""), [unit]
            job = PrepareJob(next(self._numbers), read.source, file.path, read.size)
            self._jobs[job.id] = file.waiters
            self.process.do(job, partial(self._prepared, file, job))

    def _prepared(self, file: ImageFile, job: PrepareJob, end: JobEnd) -> None:
        self._jobs.pop(job.id, None)
        self._remove(job.source)
        waiters, file.waiters = file.waiters, []
        found: ImageFile | ImageError = file
        if isinstance(end, Prepared):
            file.shape, file.num_bytes = end.shape, end.num_bytes
        else:
            if file.shape is None:
                del self.files[file.content]
            self._remove(file.path)
            found = _error_of(end)
        for unit in waiters:
            if isinstance(end, Cancelled) and not unit.prompt.is_over:
                self._begin_unit(unit)  # it came when the others had gone
            else:
                self._end_unit(unit, found)
        self._evict()

    def _end_unit(self, unit: _Unit, found: ImageFile | ImageError) -> None:
        self._active[unit.is_web] -= 1
        if not unit.prompt.is_over:
            if isinstance(found, ImageFile):
                found.num_users += 1
                unit.prompt.files[unit.place] = found
            unit.prompt.end(unit.place, found)
        self._loop.call_soon(self._go_on)

    # ------------------------------------------------------------ files

    def _content(self, digest: bytes) -> bytes:
        return hashlib.sha256(self._salt + digest).digest()

    def _place(self) -> str:
        """The folder of the files. On a thread, one of which makes it, again if others removed it: some systems empty
        shared memory when a user logs out.
        """
        with self._making_folder:
            if self._folder is not None and not os.path.isdir(self._folder.path):
                self._folder.remove()
                self._folder = None
            if self._folder is None and not self._is_closed:
                self._folder = PrivateDirectory(folder_base())
                disk = os.statvfs(self._folder.path)
                self._max_kept_bytes = min(MAX_KEPT_BYTES, disk.f_bavail * disk.f_frsize // KEPT_SHARE)
            if self._folder is None:
                raise FileNotFoundError("the engine was shut down")
            return self._folder.path

    def _new_path(self, kind: str) -> str:
        return os.path.join(self._place(), f"{kind}{next(self._numbers)}{MEDIA_SUFFIX}")

    def _evict(self) -> None:
        """Remove files that no prompt and no session needs, beyond those that are kept for the next ones."""
        unused = (file for file in self.files.values() if not file.num_users and not file.num_sessions)
        kept = [file for file in unused if file.shape is not None and not file.waiters]
        num_bytes = sum(file.num_bytes for file in kept)
        for num_removed, file in enumerate(kept):
            if num_bytes <= self._max_kept_bytes and len(kept) - num_removed <= MAX_KEPT_FILES:
                return
            num_bytes -= file.num_bytes
            del self.files[file.content]
            self._remove(file.path)

    def _remove(self, path: str) -> None:
        """Remove a file, if it is there, on a thread."""
        if self._is_closed or not path:
            return
        if self._files_thread is None:
            self._files_thread = WorkerThread("aioengine-image-files")
        self._files_thread.submit(partial(Path(path).unlink, missing_ok=True))


def folder_base() -> str:
    """Where the folder of the files is: in memory where there is much of it, which spares a disk short-lived files."""
    try:
        remove_stale(SHARED_MEMORY)  # first: they may have what is missing
        shared = os.statvfs(SHARED_MEMORY)
    except OSError:
        return tempfile.gettempdir()
    has_room = shared.f_bavail * shared.f_frsize >= MIN_SHARED_BYTES and os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
    return SHARED_MEMORY if has_room else tempfile.gettempdir()


def _error_of(end: JobEnd) -> ImageError:
    if isinstance(end, Refused):
        return ValueError(end.reason)
    return RequestError(STAGE, end.reason if isinstance(end, Broken) else f"an unexpected reply: {end!r:.200}")
