"""Reads the images of prompts, has the media process prepare them, and keeps the results as files, by content.

Runs on the engine's loop. Threads read, write and remove files. An image whose result is still kept costs only a hash
of its bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import tempfile
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast

import msgspec
from msgspec.structs import replace

from aioengine.errors import EngineOverloadedError, RequestError, describe
from aioengine.media.intake.media_jobs import MediaProcess
from aioengine.media.intake.sources import ImageSource, read_source
from aioengine.media.tokens._base import ImageModel, ImageShape
from aioengine.protocol.media import (
    Broken,
    Cancelled,
    Fetched,
    FetchJob,
    JobEnd,
    MediaOrders,
    PreparedImage,
    PrepareJob,
    Refused,
)
from aioengine.supervision.tasks import WorkerThread, post
from aioengine.transport.addresses import MEDIA_SUFFIX, SHARED_MEMORY, PrivateDirectory, remove_stale

MAX_FETCHES: Final = 16
"""Maximum number of downloads at a time, in addition to the images that are prepared."""

NUM_THREADS: Final = 4
MAX_WORKERS: Final = 16
MAX_KEPT_BYTES: Final = 1 << 28
"""Limit of the unused files; the least recently used are removed first. Less on a small disk."""

MAX_KEPT_FILES: Final = 2048
"""Limit of the unused files, because the loop visits all files for each image."""

KEPT_SHARE: Final = 4
"""Unused files take at most 1 / ``KEPT_SHARE`` of the disk space that is free when their folder is created."""

MAX_USED_BYTES: Final = 1 << 31
"""If the files of open requests take more, the images of further prompts wait."""

MAX_SESSION_BYTES: Final = 1 << 31
"""Limit of the files that open sessions keep."""

MIN_SHARED_BYTES: Final = 1 << 33
"""Files are in shared memory only if this much of it is free, which is much more than they take."""

STAGE: Final = "image"

ImageError = ValueError | RequestError
_Result = TypeVar("_Result")


class ImageFile(msgspec.Struct):
    """A prepared image, or one that is being prepared.

    Attributes:
        content: sha256 of its bytes and of the settings of the preparation. shape: None until it is prepared.
        num_users: prompts that need it. num_sessions: open sessions that have it in a turn.
        waiters: images of prompts that wait for the preparation; empty if it is not being prepared.
    """

    content: bytes
    path: str
    shape: ImageShape | None = None
    num_bytes: int = 0
    num_users: int = 0
    num_sessions: int = 0
    waiters: list[_PromptImage] = []


class _ReadImage(NamedTuple):
    """An image whose bytes were read.

    content: as in ``ImageFile``. source: the file with the bytes; "" if the image is prepared already. size: (width,
    height) if these are RGB bytes; (0, 0) if they are an image file.
    """

    content: bytes
    source: str
    size: tuple[int, int] = (0, 0)


class ImagesOfPrompt:
    """The images of one prompt, from reading until the prompt is over.

    Attributes:
        files: the prepared images, by their number in the prompt. error: of the first image that failed.
    """

    def __init__(self, sources: Sequence[ImageSource], name: str) -> None:
        """``name``: for error messages; " of prompt 3" in a batch."""
        self.sources = sources
        self.files: dict[int, ImageFile] = {}
        self.error: ImageError | None = None
        self.is_released = False
        self._name = name
        self._done: Callable[[], None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the prompt needs no more images."""
        return self.is_released or self.error is not None

    @property
    def prepared(self) -> list[ImageFile]:
        """The prepared images in the order of the prompt."""
        return [self.files[number] for number in sorted(self.files)]

    def when_done(self, done: Callable[[], None]) -> None:
        """Call ``done`` when all images are prepared or one has failed, possibly now. Not called after the release."""
        if self.error is not None or len(self.files) == len(self.sources):
            done()
        else:
            self._done = done

    def end(self, number: int, result: ImageFile | ImageError) -> None:
        """Take the result of one image. An error ends the prompt."""
        if self.is_over:
            return
        if isinstance(result, ImageFile):
            result.num_users += 1
            self.files[number] = result
            if len(self.files) < len(self.sources):
                return
        else:
            image = f"image {number}{self._name} ({self.sources[number].shown})"
            if isinstance(result, RequestError):
                self.error = RequestError(STAGE, f"{image}: {result.cause}")
            else:
                self.error = ValueError(f"{image}: {result}")
        if self._done is not None:
            self._done()


class _PromptImage(NamedTuple):
    """One image of a prompt."""

    prompt: ImagesOfPrompt
    number: int

    @property
    def source(self) -> ImageSource:
        return self.prompt.sources[self.number]

    @property
    def is_web(self) -> bool:
        return self.source.kind == "web"


class ImageIntake:
    """Reads, prepares and keeps images. On the engine's loop, except ``close``.

    Attributes:
        files: by content, least recently used first.
    """

    def __init__(self, model: ImageModel, num_workers: int, *, is_for_gpu: bool = False) -> None:
        """is_for_gpu: the model runs on a GPU, which resizes pictures."""
        self.model = model
        self.files: OrderedDict[bytes, ImageFile] = OrderedDict()
        self._num_workers = min(MAX_WORKERS, num_workers)
        self._loop = asyncio.get_running_loop()
        self._num_session_bytes = 0
        self._max_kept_bytes = MAX_KEPT_BYTES
        # Part of the key, because the same bytes give another result with other settings.
        self._salt = hashlib.sha256(
            msgspec.json.encode([model.processor, model.settings, dict(model.family.options)], order="deterministic")
        ).digest()
        self._folder: PrivateDirectory | None = None
        self._folder_lock = threading.Lock()
        self._threads: list[WorkerThread[Any]] = []
        self._next_thread = 0
        self._waiting: deque[_PromptImage] = deque()
        self._active = {True: 0, False: 0}  # number of images that are worked on, by ``is_web``
        self._jobs: dict[int, list[_PromptImage]] = {}  # by job id: the images that wait for the job
        self._numbers = itertools.count()
        self._is_closed = False
        self.process = MediaProcess(
            MediaOrders(
                processor=model.processor,
                settings=model.settings,
                options=dict(model.family.options),
                limits=replace(model.limits, allowed_local_media_path=None),  # for files, which are read here
                num_workers=self._num_workers,
                resizes_on_device=is_for_gpu,
            ),
            lambda: Path(self._folder_path()),
        )

    def begin(self, prompt: ImagesOfPrompt) -> None:
        """Read and prepare the images of a prompt. The results go to ``prompt.end``."""
        self._waiting.extend(_PromptImage(prompt, number) for number in range(len(prompt.sources)))
        self._loop.call_soon(self._begin_waiting)

    def release(self, prompt: ImagesOfPrompt) -> None:
        """Release the images of a prompt, and cancel the work that no other prompt needs. May be called again."""
        if prompt.is_released:
            return
        prompt.is_released = True
        for file in prompt.files.values():
            file.num_users -= 1
        for number, images in list(self._jobs.items()):
            if all(image.prompt.is_over for image in images):
                del self._jobs[number]
                self.process.cancel(number)
        self._evict()
        self._begin_waiting()

    def keep(self, contents: Iterable[bytes]) -> None:
        """Keep prepared images for a session that did not have them before, until ``let_go``.

        Raises EngineOverloadedError if the files of all sessions would be too large; then none of these is kept.
        """
        files = [self.files[content] for content in contents]
        added = sum(file.num_bytes for file in files if not file.num_sessions)
        if added and self._num_session_bytes + added > MAX_SESSION_BYTES:
            taken = f"the images of open sessions take {self._num_session_bytes} of {MAX_SESSION_BYTES} bytes"
            raise EngineOverloadedError(f"{taken}; close some of them, or open them with a timeout")
        self._num_session_bytes += added
        for file in files:
            file.num_sessions += 1

    def let_go(self, contents: Iterable[bytes]) -> None:
        """End ``keep`` for these images."""
        for content in contents:
            file = self.files[content]
            file.num_sessions -= 1
            if not file.num_sessions:
                self._num_session_bytes -= file.num_bytes
        self._evict()

    def close(self) -> None:
        """Kill the media process and remove all files. From any thread; may be called again."""
        self._is_closed = True
        self.process.close()
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.close()
        with self._folder_lock:
            folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()

    # ------------------------------------------------------------ the steps of one image

    def _begin_waiting(self) -> None:
        """Begin with waiting images, up to the limits of downloads and of other images."""
        limits = {True: MAX_FETCHES, False: self._num_workers + NUM_THREADS}
        still_waiting: deque[_PromptImage] = deque()
        while self._waiting and not self._is_closed and any(self._active[kind] < limits[kind] for kind in limits):
            image = self._waiting.popleft()
            if image.prompt.is_over:
                continue
            if self._active[image.is_web] >= limits[image.is_web] or not self._has_space(image):
                still_waiting.append(image)
                continue
            self._active[image.is_web] += 1
            self._begin_image(image)
        self._waiting.extendleft(reversed(still_waiting))

    def _has_space(self, image: _PromptImage) -> bool:
        """Whether to begin with an image: the used files are below their limit, no other image is in progress, or its
        prompt has files already. A prompt that waited would keep its files.
        """
        num_bytes = sum(file.num_bytes for file in self.files.values() if file.num_users)
        return num_bytes < MAX_USED_BYTES or bool(image.prompt.files) or not any(self._active.values())

    def _begin_image(self, image: _PromptImage) -> None:
        try:
            if image.is_web:
                job = FetchJob(next(self._numbers), cast("str", image.source.value), self._new_path())
                self._jobs[job.id] = [image]
                self.process.do(job, partial(self._fetched, image, job))
                return
            reading = self._in_thread(partial(self._read, image.source))
            reading.add_done_callback(lambda reading: post(self._loop, self._was_read, image, reading))
        except Exception as error:  # for example, no thread can be started
            self._end_image(image, RequestError(STAGE, describe(error)))

    def _read(self, source: ImageSource) -> _ReadImage:
        """Read an image, and write its bytes to a file unless the image is prepared already. On a thread."""
        data, digest, size = read_source(source, self.model.limits)
        content = self._content(digest)
        known = self.files.get(content)
        if known is not None and known.shape is not None and os.path.exists(known.path):
            return _ReadImage(content, "")
        path = self._new_path()
        try:
            Path(path).write_bytes(data)
        except OSError:  # if the disk is full, free the space of this file
            Path(path).unlink(missing_ok=True)
            raise
        return _ReadImage(content, path, size)

    def _was_read(self, image: _PromptImage, reading: Future[_ReadImage]) -> None:
        if reading.cancelled():
            return  # closed
        error = reading.exception()
        if error is None:
            self._prepare(image, reading.result())
        else:
            self._end_image(image, error if isinstance(error, ValueError) else RequestError(STAGE, describe(error)))

    def _fetched(self, image: _PromptImage, job: FetchJob, end: JobEnd) -> None:
        self._jobs.pop(job.id, None)
        if isinstance(end, Fetched):
            self._prepare(image, _ReadImage(self._content(bytes.fromhex(end.digest)), job.path))
        else:
            self._remove(job.path)
            self._end_image(image, _error_of(end))

    def _prepare(self, image: _PromptImage, read: _ReadImage) -> None:
        """Use the prepared file, or wait for its preparation, or start it (again if others removed the file)."""
        file = self.files.get(read.content)
        if file is not None and (file.waiters or not read.source or os.path.exists(file.path)):
            self.files.move_to_end(read.content)
            if read.source:
                self._remove(read.source)
            if image.prompt.is_over or not file.waiters:
                self._end_image(image, file)
            else:
                file.waiters.append(image)
            return
        if image.prompt.is_over:
            self._remove(read.source)
            self._end_image(image, None)
        elif not read.source:  # the file was evicted since it was read
            self._begin_image(image)
        else:
            if file is None:
                file = self.files[read.content] = ImageFile(read.content, "")
            file.path, file.waiters = self._new_path(), [image]
            job = PrepareJob(next(self._numbers), read.source, file.path, read.size)
            self._jobs[job.id] = file.waiters
            self.process.do(job, partial(self._prepared, file, job))

    def _prepared(self, file: ImageFile, job: PrepareJob, end: JobEnd) -> None:
        self._jobs.pop(job.id, None)
        self._remove(job.source)
        waiters, file.waiters = file.waiters, []
        result: ImageFile | ImageError = file
        if isinstance(end, PreparedImage):
            file.shape, file.num_bytes = end.shape, end.num_bytes
        else:
            if file.shape is None:
                del self.files[file.content]
            self._remove(file.path)
            result = _error_of(end)
        for image in waiters:
            if isinstance(end, Cancelled) and not image.prompt.is_over:
                self._begin_image(image)  # it began to wait after the job was cancelled
            else:
                self._end_image(image, result)
        self._evict()

    def _end_image(self, image: _PromptImage, result: ImageFile | ImageError | None) -> None:
        """End the work on an image. result: None if its prompt is over."""
        self._active[image.is_web] -= 1
        if result is not None:
            image.prompt.end(image.number, result)
        self._loop.call_soon(self._begin_waiting)

    # ------------------------------------------------------------ files

    def _content(self, digest: bytes) -> bytes:
        return hashlib.sha256(self._salt + digest).digest()

    def _folder_path(self) -> str:
        """Return the folder of the files. Create it again if others removed it: some systems empty shared memory when
        a user logs out.
        """
        with self._folder_lock:
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

    def _new_path(self) -> str:
        return os.path.join(self._folder_path(), f"{next(self._numbers)}{MEDIA_SUFFIX}")

    def _evict(self) -> None:
        """Remove unused files, down to their limits."""
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
        """Remove a file on a thread, if it exists."""
        if path and not self._is_closed:
            self._in_thread(partial(Path(path).unlink, missing_ok=True))

    def _in_thread(self, work: Callable[[], _Result]) -> Future[_Result]:
        """Run ``work`` on one of the threads."""
        if not self._threads:
            self._threads = [WorkerThread(f"aioengine-images-{number}") for number in range(NUM_THREADS)]
        self._next_thread = (self._next_thread + 1) % NUM_THREADS
        return self._threads[self._next_thread].submit(work)


def folder_base() -> str:
    """Return the parent of the files' folder: shared memory if there is enough, to spare a disk short-lived files."""
    try:
        remove_stale(SHARED_MEMORY)  # first, since this may free enough
        shared = os.statvfs(SHARED_MEMORY)
    except OSError:
        return tempfile.gettempdir()
    is_enough = shared.f_bavail * shared.f_frsize >= MIN_SHARED_BYTES and os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
    return SHARED_MEMORY if is_enough else tempfile.gettempdir()


def _error_of(end: JobEnd) -> ImageError:
    if isinstance(end, Refused):
        return ValueError(end.reason)
    return RequestError(STAGE, end.reason if isinstance(end, Broken) else f"an unexpected reply: {end!r:.200}")
