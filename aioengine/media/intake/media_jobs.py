"""Starts the media process, gives it jobs, and replaces it if it dies or a job in it hangs.

The supervisor does not do this, because the media process is not part of an incarnation: its loss costs only images.
The jobs that it was doing fail. The jobs that wait are done by the next process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import DecodeError
from msgspec.structs import replace

from aioengine.errors import EngineStartupError, describe, describe_exit
from aioengine.file_descriptors import SpareDescriptors
from aioengine.logs import warn
from aioengine.protocol.media import (
    Broken,
    CancelJob,
    Cancelled,
    Job,
    JobEnd,
    MediaReady,
    PrepareJob,
    Waits,
    decode_reply,
    encode_line,
)
from aioengine.protocol.messages import Role
from aioengine.supervision.launchers._base import KILL_WAIT_S
from aioengine.supervision.launchers._process_child import ProcessChild
from aioengine.supervision.spawning import start_child
from aioengine.supervision.tasks import WorkerThread, post

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from aioengine.protocol.media import MediaOrders

logger = logging.getLogger(__name__)

MEDIA: Final = Role("media")
START_TIMEOUT_S: Final = 120.0
GRACE_S: Final = 1.0
"""A job that takes longer than its own limit by this much hangs."""

_CHECK_S: Final = 0.5
_READ_BYTES: Final = 1 << 18


class _QueuedJob(NamedTuple):
    job: Job
    done: Callable[[JobEnd], None]


class MediaProcess:
    """Does jobs in the media process. On the engine's loop, except ``close``.

    Attributes:
        child: the process; None while there is none.
        num_started: the number of starts.
    """

    def __init__(self, orders: MediaOrders, folder: Callable[[], Path]) -> None:
        """``folder``: returns the folder for the log; called on a thread. ``orders``: each start fills in its ids."""
        self.child: ProcessChild | None = None
        self.num_started = 0
        self._orders = orders
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self._thread: WorkerThread[tuple[ProcessChild, socket.socket]] | None = None
        self._starting: Future[tuple[ProcessChild, socket.socket]] | None = None
        self._channel: socket.socket | None = None
        self._is_ready = False
        self._is_closed = False
        self._unread = b""
        self._waiting: deque[_QueuedJob] = deque()
        self._running: dict[int, tuple[_QueuedJob, float]] = {}  # with the time of the start
        self._started_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def do(self, job: Job, done: Callable[[JobEnd], None]) -> None:
        """Queue a job. ``done`` is called with its end on the loop, exactly once unless this is closed."""
        self._waiting.append(_QueuedJob(job, done))
        self._give_jobs()

    def cancel(self, number: int) -> None:
        """End a job early. Its end comes soon: ``Cancelled``, or another if it was too late."""
        for queued in self._waiting:
            if queued.job.id == number:
                self._waiting.remove(queued)
                self._loop.call_soon(queued.done, Cancelled(number))
                return
        if number in self._running:
            with contextlib.suppress(OSError):  # it has just ended, or does not read: its jobs end in another way
                self._send([CancelJob(number)])

    def start(self) -> None:
        """Start the process if there is none. It takes one or two seconds, so call this before the first job."""
        if self._is_closed or self._starting is not None or self.child is not None:
            return
        self._started_at = time.monotonic()
        self._watch_time()
        try:
            if self._thread is None:  # kept, because the process ends with the thread that started it
                self._thread = WorkerThread("aioengine-media")
            self._starting = self._thread.submit(self._spawn)
        except EngineStartupError as error:
            self._loop.call_soon(self._fail_waiting, str(error))
            return
        self._starting.add_done_callback(lambda started: post(self._loop, self._spawned, started))

    def close(self) -> None:
        """Kill the process; no job ends any more. From any thread; may be called again."""
        self._is_closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()
        if self._starting is not None:
            with contextlib.suppress(Exception):  # it could not be started
                self.child, self._channel = self._starting.result(KILL_WAIT_S)
        child, self.child = self.child, None
        if child is not None:
            child.kill()
            child.reap(KILL_WAIT_S)
        if not post(self._loop, self._disconnect, child):
            self._disconnect(child)

    # ------------------------------------------------------------ start and end

    def _spawn(self) -> tuple[ProcessChild, socket.socket]:
        """Run on the thread."""
        ours, theirs = socket.socketpair()
        try:
            orders = replace(self._orders, parent_pid=os.getpid(), socket_fd=theirs.fileno())
            log_path = self._folder() / f"{MEDIA}.log"
            popen = start_child(str(MEDIA), log_path, encode_line([orders]).rstrip(), (theirs.fileno(),))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return ProcessChild(MEDIA, popen, log_path, SpareDescriptors()), ours

    def _spawned(self, started: Future[tuple[ProcessChild, socket.socket]]) -> None:
        if self._is_closed or self._starting is not started:
            return
        self._starting = None
        try:
            child, channel = self.child, self._channel = started.result()
        except Exception as error:
            self._fail_waiting(f"the media process could not be started: {error}")
            return
        self.num_started += 1
        self._unread = b""
        child.watch(partial(self._lost, child))
        self._loop.add_reader(channel, self._read)

    def _lost(self, child: ProcessChild, reason: str = "") -> None:
        """The process has exited, or is to be killed: its jobs fail."""
        if self._is_closed or child is not self.child:
            return
        was_ready = self._is_ready
        self._disconnect(child)
        self.child = None
        child.kill()
        child.reap(KILL_WAIT_S)
        if not reason:
            lines = child.log_lines()
            reason = f"the media process {describe_exit(child.exit_code)}" + (f" ({lines[-1]:.300})" if lines else "")
        warn(logger, "%s; the next image starts another", reason)
        running = [queued for queued, _ in self._running.values()]
        self._running.clear()
        for queued in running:
            self._loop.call_soon(queued.done, Broken(queued.job.id, reason))
        if not was_ready:  # the next process would fail too
            self._fail_waiting(reason)
        self._give_jobs()

    def _disconnect(self, child: ProcessChild | None) -> None:
        self._is_ready = False
        channel, self._channel = self._channel, None
        if not self._loop.is_closed():
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if channel is not None:
                self._loop.remove_reader(channel)
        if channel is not None:
            channel.close()
        if child is not None:
            child.close()

    def _fail_waiting(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, deque()
        for queued in waiting:
            self._loop.call_soon(queued.done, Broken(queued.job.id, reason))

    # ------------------------------------------------------------ jobs

    def _give_jobs(self) -> None:
        """Send all downloads, and as many pictures to prepare as the process has workers. Start it if there is none."""
        if self._is_closed or not self._waiting:
            return
        child = self.child
        if child is None or not self._is_ready:
            self.start()
            return
        num_free = self._orders.num_workers
        num_free -= sum(isinstance(queued.job, PrepareJob) for queued, _ in self._running.values())
        chosen: list[_QueuedJob] = []
        for queued in self._waiting:
            if isinstance(queued.job, PrepareJob):
                if num_free <= 0:
                    continue
                num_free -= 1
            chosen.append(queued)
        if not chosen:
            return
        now = time.monotonic()
        for queued in chosen:
            self._waiting.remove(queued)
            self._running[queued.job.id] = queued, now
        self._watch_time()
        try:
            self._send([queued.job for queued in chosen])
        except OSError as error:  # it has just ended, and did not get these jobs
            for queued in reversed(chosen):
                del self._running[queued.job.id]
                self._waiting.appendleft(queued)
            self._lost(child, f"the media process takes no more jobs: {describe(error)}")

    def _send(self, messages: Sequence[Job | CancelJob]) -> None:
        """Raises OSError if the process has ended, or its socket is full."""
        if self._channel is not None and self.child is not None:
            line = encode_line(messages)
            if self._channel.send(line) < len(line):
                self._lost(self.child, "the media process does not read its jobs")

    def _read(self) -> None:
        channel, child = self._channel, self.child
        if channel is None or child is None:
            return
        try:
            part = channel.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            part = b""
        if not part:  # the process exits, which is watched
            self._loop.remove_reader(channel)
            return
        *lines, self._unread = (self._unread + part).split(b"\n")
        for line in lines:
            try:
                reply = decode_reply(line)
            except DecodeError as error:
                self._lost(child, f"the media process sent an invalid reply: {error}")
                return
            if isinstance(reply, MediaReady):
                self._is_ready = True
            elif isinstance(reply, Waits):
                if (running := self._running.get(reply.id)) is not None:
                    self._running[reply.id] = running[0], time.monotonic() if reply.is_over else math.inf
            elif (running := self._running.pop(reply.id, None)) is not None:
                self._loop.call_soon(running[0].done, reply)
        self._give_jobs()

    # ------------------------------------------------------------ time

    def _watch_time(self) -> None:
        """Check for jobs that hang, as long as there are jobs."""
        if self._timer is None:
            self._timer = self._loop.call_later(_CHECK_S, self._check_time)

    def _check_time(self) -> None:
        self._timer = None
        now, child = time.monotonic(), self.child
        if self._is_closed or (self._is_ready and not self._running) or (child is None and self._starting is None):
            return
        self._watch_time()
        if child is None:
            return
        if not self._is_ready:
            if now > self._started_at + START_TIMEOUT_S:
                self._lost(child, f"the media process was not ready within {START_TIMEOUT_S:g} seconds")
            return
        timeout_s = self._orders.timeout_s
        late = [queued for queued, since in self._running.values() if now > since + timeout_s + GRACE_S]
        if not late:
            return
        reason = f"it took longer than media_timeout={timeout_s:g} seconds, and its process was ended"
        for queued in late:
            del self._running[queued.job.id]
            self._loop.call_soon(queued.done, Broken(queued.job.id, reason))
        # The other jobs did nothing wrong: the next process does them.
        self._waiting.extendleft(queued for queued, _ in reversed(self._running.values()))
        self._running.clear()
        self._lost(child, "a job hung")
