"""The media process as the frontend sees it: it does jobs, and is started anew for the next one when it was lost.

On the engine's loop. It dies with this process like its siblings. When it dies, or a job in it hangs, the jobs that it
was doing fail, and only those: the others wait for the next one.
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
    NUM_FETCHES,
    Broken,
    CancelJob,
    Cancelled,
    FetchJob,
    Job,
    JobEnd,
    MediaReady,
    Waits,
    decode_reply,
    encode_line,
)
from aioengine.protocol.messages import Role
from aioengine.supervision.family import KILL_WAIT_S
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
"""How much longer than its own limit a job may take before it hangs."""

_CHECK_S: Final = 0.5
_READ_BYTES: Final = 1 << 18


class _Given(NamedTuple):
    """A job and who waits for it."""

    job: Job
    done: Callable[[JobEnd], None]


class _Started(NamedTuple):
    child: ProcessChild
    channel: socket.socket


class MediaProcess:
    """Does jobs in the media process. On the engine's loop, but for ``close``.

    Attributes:
        child: the process; None: there is none now.
        num_started: how often it was started.
    """

    def __init__(self, orders: MediaOrders, folder: Callable[[], Path]) -> None:
        """``folder``: gives the folder for its log; called on a thread. ``orders``: of each start, but for its ids."""
        self.child: ProcessChild | None = None
        self.num_started = 0
        self._orders = orders
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self._thread: WorkerThread[_Started] | None = None
        self._starting: Future[_Started] | None = None
        self._channel: socket.socket | None = None
        self._is_ready = False
        self._is_closed = False
        self._unread = b""
        self._waiting: deque[_Given] = deque()
        self._running: dict[int, tuple[_Given, float]] = {}
        self._started_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def do(self, job: Job, done: Callable[[JobEnd], None]) -> None:
        """Do a job after those that wait. ``done`` gets its end on the loop, exactly once unless this is closed."""
        self._waiting.append(_Given(job, done))
        self._go_on()

    def cancel(self, number: int) -> None:
        """Nobody waits for this job any more. Its end comes soon, ``Cancelled`` or another."""
        for given in self._waiting:
            if given.job.id == number:
                self._waiting.remove(given)
                self._loop.call_soon(given.done, Cancelled(number))
                return
        if number in self._running:
            with contextlib.suppress(OSError):  # it has just ended, or reads nothing: its jobs end in another way
                self._send([CancelJob(number)])

    def start(self) -> None:
        """Start it before the first job, which takes a second or two. A process that fails is started for each job."""
        if not self._is_closed and self._starting is None and self.child is None:
            self._start()

    def close(self) -> None:
        """End the process at once; no job is answered any more. From any thread; harmless when repeated."""
        self._is_closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()
        if self._starting is not None:
            with contextlib.suppress(Exception):  # it could not be started
                self._take(self._starting.result(KILL_WAIT_S))
        child, self.child = self.child, None
        if child is not None:
            child.kill()
            child.reap(KILL_WAIT_S)
        if not post(self._loop, self._end_watching, child):  # the loop is closed, and watches nothing any more
            self._close_channel(child)

    # ------------------------------------------------------------ start and end

    def _go_on(self) -> None:
        """Give the process the jobs that it has room for; start it where there is none."""
        if self._is_closed or not self._waiting:
            return
        if self._is_ready:
            self._send_some()
        else:
            self.start()

    def _start(self) -> None:
        self._started_at = time.monotonic()
        self._watch_time()
        try:
            if self._thread is None:  # which lives as long as the process: that ends with the thread that started it
                self._thread = WorkerThread("aioengine-media")
            self._starting = self._thread.submit(self._spawn)
        except EngineStartupError as error:
            self._loop.call_soon(self._fail_waiting, str(error))
            return
        self._starting.add_done_callback(lambda started: post(self._loop, self._spawned, started))

    def _spawn(self) -> _Started:
        """On the thread."""
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
        return _Started(ProcessChild(MEDIA, popen, log_path, SpareDescriptors()), ours)

    def _spawned(self, started: Future[_Started]) -> None:
        if self._is_closed or self._starting is not started:
            return
        self._starting = None
        error = None if started.cancelled() else started.exception()
        if started.cancelled() or error is not None:
            self._fail_waiting(f"the media process could not be started: {error}")
            return
        self._take(started.result())
        child, channel = self.child, self._channel
        if child is not None and channel is not None:
            child.watch(partial(self._lost, child))
            self._loop.add_reader(channel, self._read)

    def _take(self, started: _Started) -> None:
        self.child, self._channel = started
        self.num_started += 1
        self._unread = b""

    def _lost(self, child: ProcessChild, reason: str = "") -> None:
        """The process has ended, or is killed now: what it was doing fails."""
        if self._is_closed or child is not self.child:
            return
        was_ready = self._is_ready
        self._end_watching(child)
        self.child = None
        child.kill()
        child.reap(KILL_WAIT_S)
        if not reason:
            lines = child.log_lines()
            reason = f"the media process {describe_exit(child.exit_code)}" + (f" ({lines[-1]:.300})" if lines else "")
        warn(logger, "%s; the next image starts another", reason)
        running = [given for given, _ in self._running.values()]
        self._running.clear()
        for given in running:
            self._loop.call_soon(given.done, Broken(given.job.id, reason))
        if not was_ready:  # the next one would do no better
            self._fail_waiting(reason)
        self._go_on()

    def _end_watching(self, child: ProcessChild | None) -> None:
        self._is_ready = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._channel is not None:
            self._loop.remove_reader(self._channel)
        self._close_channel(child)

    def _close_channel(self, child: ProcessChild | None) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
        if child is not None:
            child.close()

    def _fail_waiting(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, deque()
        for given in waiting:
            self._loop.call_soon(given.done, Broken(given.job.id, reason))

    # ------------------------------------------------------------ jobs

    def _send_some(self) -> None:
        """Give out jobs of each kind, up to the number of its workers."""
        free = {True: NUM_FETCHES, False: self._orders.num_workers}
        for given, _ in self._running.values():
            free[isinstance(given.job, FetchJob)] -= 1
        chosen: list[_Given] = []
        for given in self._waiting:
            kind = isinstance(given.job, FetchJob)
            if free[kind] > 0:
                free[kind] -= 1
                chosen.append(given)
            elif not any(room > 0 for room in free.values()):
                break
        now = time.monotonic()
        for given in chosen:
            self._waiting.remove(given)
            self._running[given.job.id] = given, now
        if chosen and self._channel is not None and self.child is not None:
            self._watch_time()
            try:
                self._send([given.job for given in chosen])
            except OSError as error:  # it has just ended, and never got these
                for given in reversed(chosen):
                    del self._running[given.job.id]
                    self._waiting.appendleft(given)
                self._lost(self.child, f"the media process takes no more jobs: {describe(error)}")

    def _send(self, orders: Sequence[Job | CancelJob]) -> None:
        """Raises OSError: it takes nothing."""
        if self._channel is not None and self.child is not None:
            line = encode_line(orders)
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
        if not part:  # it ends; its exit is watched
            self._loop.remove_reader(channel)
            return
        *lines, self._unread = (self._unread + part).split(b"\n")
        for line in lines:
            try:
                reply = decode_reply(line)
            except DecodeError as error:
                self._lost(child, f"the media process sent what is no reply: {error}")
                return
            if isinstance(reply, MediaReady):
                self._is_ready = True
            elif isinstance(reply, Waits):
                if (running := self._running.get(reply.id)) is not None:
                    self._running[reply.id] = running[0], time.monotonic() if reply.is_over else math.inf
            elif (running := self._running.pop(reply.id, None)) is not None:
                self._loop.call_soon(running[0].done, reply)
        self._go_on()

    # ------------------------------------------------------------ time

    def _watch_time(self) -> None:
        """Look for jobs that hang, for as long as there are any."""
        if self._timer is None:
            self._timer = self._loop.call_later(_CHECK_S, self._check_time)

    def _check_time(self) -> None:
        self._timer = None
        now, child = time.monotonic(), self.child
        if self._is_closed or (self._is_ready and not self._running) or (child is None and self._starting is None):
            return
        self._watch_time()
        if not self._is_ready:
            if child is not None and now > self._started_at + START_TIMEOUT_S:
                self._lost(child, f"the media process was not ready within {START_TIMEOUT_S:g} seconds")
            return
        limit_s = self._orders.timeout_s + GRACE_S
        late = [given for given, since in self._running.values() if now > since + limit_s]
        if late and child is not None:
            for given in late:
                del self._running[given.job.id]
                reason = (
                    f"it took longer than media_timeout={self._orders.timeout_s:g} seconds, and its process was ended"
                )
                self._loop.call_soon(given.done, Broken(given.job.id, reason))
            # The other jobs did nothing wrong.
            self._waiting.extendleft(given for given, _ in reversed(self._running.values()))
            self._running.clear()
            self._lost(child, "a job hung")
