"""Starts the media process, gives it jobs, and replaces it if it dies or a job in it hangs.

The supervisor does not do this, because the media process is not part of an incarnation: its loss costs only images.
If it dies, the jobs that it was doing fail. If a job hangs, only this job fails. The next process does all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import (
    Callable,  # a field of a Struct
    Sequence,
)
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import DecodeError, Struct
from msgspec.structs import replace

from aioengine.errors import EngineStartupError, describe, describe_exit
from aioengine.logs import warn
from aioengine.protocol.media import (
    Broken,
    CancelJob,
    Cancelled,
    JobEnd,
    JobWaiting,
    MediaJob,
    MediaOrders,
    MediaReady,
    PrepareJob,
    decode_reply,
    encode_line,
)
from aioengine.protocol.messages import Role
from aioengine.supervision.launchers._process_child import KILL_WAIT_S, ProcessChild, start_child
from aioengine.supervision.tasks import WorkerThread, post

logger = logging.getLogger(__name__)

MEDIA: Final = Role("media")
START_TIMEOUT_S: Final = 120.0
GRACE_S: Final = 1.0
"""A job that takes longer than its own limit by this much hangs."""

_READ_BYTES: Final = 1 << 18


class _QueuedJob(Struct, eq=False):
    """``timer``: runs while the media process works on the job, and ends a job that hangs."""

    job: MediaJob
    done: Callable[[JobEnd], None]
    timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class MediaProcess:
    """Does jobs in the media process. On the engine's loop, except ``close``.

    Attributes:
        child: the process; None while there is none.
    """

    def __init__(self, orders: MediaOrders, folder: Callable[[], Path]) -> None:
        """``folder``: returns the folder for the log; called on a thread. ``orders``: each start fills in its ids."""
        self.child: ProcessChild | None = None
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
        self._running: dict[int, _QueuedJob] = {}
        self._start_timer: asyncio.TimerHandle | None = None

    def do(self, job: MediaJob, done: Callable[[JobEnd], None]) -> None:
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
        return ProcessChild(MEDIA, popen, log_path), ours

    def _spawned(self, started: Future[tuple[ProcessChild, socket.socket]]) -> None:
        if self._is_closed or self._starting is not started:
            return
        self._starting = None
        try:
            child, channel = self.child, self._channel = started.result()
        except Exception as error:
            self._fail_waiting(f"the media process could not be started: {error}")
            return
        self._unread = b""
        child.watch(partial(self._lost, child))
        self._loop.add_reader(channel, self._read)
        late = f"the media process was not ready within {START_TIMEOUT_S:g} seconds"
        self._start_timer = self._loop.call_later(START_TIMEOUT_S, self._lost, child, late)

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
        for queued in self._take_running():
            self._loop.call_soon(queued.done, Broken(queued.job.id, reason))
        if not was_ready:  # the next process would fail too
            self._fail_waiting(reason)
        self._give_jobs()

    def _disconnect(self, child: ProcessChild | None) -> None:
        self._is_ready = False
        channel, self._channel = self._channel, None
        if self._start_timer is not None:
            self._start_timer.cancel()
        if channel is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(channel)
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
        num_free -= sum(isinstance(queued.job, PrepareJob) for queued in self._running.values())
        chosen: list[_QueuedJob] = []
        for queued in self._waiting:
            if isinstance(queued.job, PrepareJob):
                if num_free <= 0:
                    continue
                num_free -= 1
            chosen.append(queued)
        if not chosen:
            return
        for queued in chosen:
            self._waiting.remove(queued)
            self._running[queued.job.id] = queued
            self._start_job_timer(queued)
        try:
            self._send([queued.job for queued in chosen])
        except OSError as error:  # it has just ended, and did not get these jobs
            for queued in reversed(chosen):
                queued.stop_timer()
                self._waiting.appendleft(self._running.pop(queued.job.id))
            self._lost(child, f"the media process takes no more jobs: {describe(error)}")

    def _send(self, messages: Sequence[MediaJob | CancelJob]) -> None:
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
                if self._start_timer is not None:
                    self._start_timer.cancel()
            elif (queued := self._running.get(reply.id)) is not None:
                queued.stop_timer()
                if not isinstance(reply, JobWaiting):
                    del self._running[reply.id]
                    self._loop.call_soon(queued.done, reply)
                elif reply.is_over:
                    self._start_job_timer(queued)
        self._give_jobs()

    def _take_running(self) -> list[_QueuedJob]:
        """Return the running jobs, and forget them."""
        running, self._running = list(self._running.values()), {}
        for queued in running:
            queued.stop_timer()
        return running

    def _start_job_timer(self, queued: _QueuedJob) -> None:
        queued.timer = self._loop.call_later(self._orders.limits.timeout_s + GRACE_S, self._end_late_jobs)

    def _end_late_jobs(self) -> None:
        """Fail the jobs that exceed the timeout, and end their process. The next process does the others."""
        if self._is_closed or self.child is None:
            return
        timeout_s, grace_ends_at = self._orders.limits.timeout_s, self._loop.time() + GRACE_S
        reason = f"it took longer than media_timeout={timeout_s:g} seconds, and its process was ended"
        for queued in list(self._running.values()):
            if queued.timer is not None and queued.timer.when() <= grace_ends_at:
                queued.stop_timer()
                del self._running[queued.job.id]
                self._loop.call_soon(queued.done, Broken(queued.job.id, reason))
        self._waiting.extendleft(reversed(self._take_running()))
        self._lost(self.child, "a job hung")
