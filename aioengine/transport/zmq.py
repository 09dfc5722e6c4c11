"""Frames over ZMQ PUSH and PULL sockets: one listening reader, any number of senders.

A PULL socket takes over a listening descriptor (see ``addresses``); a PUSH socket connects. Nothing here waits on a
send: what the socket does not take is kept in a bounded backlog.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import select
import signal
import time
from collections import deque
from typing import TYPE_CHECKING

import zmq

from aioengine.file_descriptors import SpareDescriptors
from aioengine.logs import log
from aioengine.protocol.codec import MAX_FRAME_BYTES, BadFrameError, FrameDecoder, FrameEncoder, FrameTooLargeError
from aioengine.transport.addresses import hide
from aioengine.transport.base import BacklogFullError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioengine.protocol.messages import Message
    from aioengine.transport.addresses import Listener

Context = zmq.Context[zmq.Socket[bytes]]
ZmqError = zmq.ZMQError

logger = logging.getLogger(__name__)

MAX_BACKLOG_BYTES = 64 * 1024 * 1024
# Frames that ZMQ itself holds for a reader that is slow, at either end.
_HIGH_WATER_MARK = 1000
_RECONNECT_MS = 10
# Descriptors that are freed for the connections which libzmq accepts at a time: it needs one for each.
FREE_TO_ACCEPT = 4
_MAX_ACCEPT_S = 1.0
_RETRY_ACCEPT_S = 0.05
# More frames than this wait for the next call, so that a flood does not keep the caller from its other work.
_MAX_FRAMES_AT_ONCE = 256


def end_context(context: Context) -> None:
    """Close a context and its sockets, without waiting for messages that were not sent.

    pyzmq gives up a context whose end a signal interrupts, and its five descriptors stay open for ever; so this thread
    takes no signal meanwhile.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        context.destroy(linger=0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ZmqSender:
    """The end that writes; for blocking loops, which call ``flush`` again while there is a backlog."""

    def __init__(
        self,
        context: Context,
        endpoint: str,
        epoch: int,
        *,
        reader: str = "the other end",
        max_backlog: int = MAX_BACKLOG_BYTES,
    ) -> None:
        """``reader``: who reads, for messages about it. ``max_backlog``: bytes that may wait for it here."""
        self._reader = reader
        self._encoder = FrameEncoder(epoch)
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._max_backlog = max_backlog
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 0)  # the reader accepts when it can
        self._socket.connect(endpoint)

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    def send(self, messages: list[Message]) -> None:
        """Send ``messages`` as one frame (as several, where one would be larger than readers take).

        Raises:
            BacklogFullError: the reader has not read for too long.
            FrameTooLargeError: a single message is larger than readers take.
        """
        try:
            frame = self._encoder.encode(messages)
        except FrameTooLargeError:
            if len(messages) == 1:
                raise
            self.send(messages[: len(messages) // 2])
            self.send(messages[len(messages) // 2 :])
            return
        if not self.flush() or not self._offer(frame):
            self._keep(bytes(frame))

    def begin(self, epoch: int) -> None:
        """What is sent from now on is of this epoch; what waits goes first."""
        self._encoder.begin(epoch)

    def flush(self) -> bool:
        """Hand the backlog to the socket; whether all of it went."""
        while self._backlog:
            if not self._offer(self._backlog[0]):
                return False
            self._backlog_bytes -= len(self._backlog.popleft())
        return True

    def close(self, linger_s: float = 0.0) -> None:
        """Close; frames on their way get ``linger_s`` from the end of the context."""
        self._backlog.clear()
        self._socket.close(linger=round(linger_s * 1000))

    def _offer(self, frame: bytes | bytearray) -> bool:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _keep(self, frame: bytes) -> None:
        if self._backlog_bytes + len(frame) > self._max_backlog:
            raise BacklogFullError(
                f"{self._reader} has not read for too long: {len(self._backlog)} frames with {self._backlog_bytes:,} "
                "bytes wait for it"
            )
        self._backlog.append(frame)
        self._backlog_bytes += len(frame)


class AsyncZmqSender(ZmqSender):
    """The end that writes, for an event loop, which empties the backlog by itself."""

    def __init__(
        self,
        context: Context,
        endpoint: str,
        epoch: int,
        *,
        reader: str = "the other end",
        max_backlog: int = MAX_BACKLOG_BYTES,
    ) -> None:
        """``reader``: who reads, for messages about it. ``max_backlog``: bytes that may wait for it here."""
        super().__init__(context, endpoint, epoch, reader=reader, max_backlog=max_backlog)
        self._loop = asyncio.get_running_loop()
        self._is_watched = False

    def send(self, messages: list[Message]) -> None:
        super().send(messages)
        if self.has_backlog and not self._is_watched:
            self._is_watched = True
            self._loop.add_reader(self._socket.fileno(), self._on_event)
            # The descriptor tells of changes alone: one that came before it was watched is found here.
            self._on_event()

    def close(self, linger_s: float = 0.0) -> None:
        self._unwatch()
        super().close(linger_s)

    def _on_event(self) -> None:
        if self.flush():
            self._unwatch()

    def _unwatch(self) -> None:
        if self._is_watched and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._is_watched = False


class _PullSocket:
    """What both readers share: take the frames that are there, outlive those that cannot be read."""

    def __init__(self, context: Context, epoch: int) -> None:
        self.num_bad_frames = 0
        self.decoder = FrameDecoder(epoch, clock=time.monotonic)
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)

    def bind(self, listener: Listener) -> None:
        """Accept connections from now on; libzmq takes over the descriptor."""
        self.socket.setsockopt(zmq.USE_FD, listener.fd)
        self.socket.bind(listener.endpoint)

    def unbind(self, listener: Listener) -> None:
        """Accept no more, and end the connections that came there."""
        self.socket.unbind(listener.endpoint)

    def drain(self) -> list[Message]:
        """The messages of all frames that have come, up to a limit of frames; [] only when none is left."""
        messages: list[Message] = []
        num_frames = 0
        with contextlib.suppress(zmq.Again):
            while num_frames < _MAX_FRAMES_AT_ONCE or not messages:
                frame = self.socket.recv(zmq.NOBLOCK)
                num_frames += 1
                try:
                    messages += self.decoder.decode(frame)
                except BadFrameError as error:
                    self._count_bad(error)
        return messages

    def _count_bad(self, error: BadFrameError) -> None:
        self.num_bad_frames += 1
        if self.num_bad_frames == 1:
            log(logger, logging.ERROR, "dropped a frame, later ones are only counted: %s", error)


class ZmqReceiver:
    """The end that reads, for a thread that does nothing else."""

    def __init__(self, context: Context, listener: Listener, epoch: int, *, wake_fd: int | None = None) -> None:
        """``wake_fd``: a descriptor that ends a wait when it can be read, for news of another kind."""
        self._pull = _PullSocket(context, epoch)
        self._pull.bind(listener)
        self._watched: list[tuple[zmq.Socket[bytes] | int, int]] = [(self._pull.socket, zmq.POLLIN)]
        if wake_fd is not None:
            self._watched.append((wake_fd, zmq.POLLIN))

    @property
    def num_bad_frames(self) -> int:
        return self._pull.num_bad_frames

    def receive(self, timeout_s: float | None) -> list[Message]:
        """Wait up to ``timeout_s`` (0: do not wait, None: for ever) and return what came, [] for nothing."""
        messages = self._pull.drain()
        if messages or timeout_s == 0:
            return messages
        timeout_ms = -1 if timeout_s is None else math.ceil(timeout_s * 1000)
        zmq.zmq_poll(self._watched, timeout_ms)
        return self._pull.drain()

    def begin(self, epoch: int) -> None:
        self._pull.decoder.begin(epoch)

    def close(self) -> None:
        self._pull.socket.close(linger=0)


class AsyncZmqReceiver:
    """The end that reads, for an event loop of any kind.

    It watches the descriptor of the socket and takes every frame that is there in one go, which costs less than a
    future for each frame. ``receive`` takes frames only while it runs, so cancelling it loses none.
    """

    def __init__(self, context: Context, epoch: int, *, spare: SpareDescriptors | None = None) -> None:
        """``spare``: freed for the moment in which a connection is accepted."""
        self._pull = _PullSocket(context, epoch)
        self._spare = spare or SpareDescriptors()
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._acceptors: dict[str, _Acceptor] = {}
        self._error: Exception | None = None
        self._loop.add_reader(self._pull.socket.fileno(), self._on_event)

    @property
    def num_bad_frames(self) -> int:
        return self._pull.num_bad_frames

    def expect(self, listener: Listener) -> None:
        """Accept one sender there, and take over the descriptor. (Those who connect at the same time come in, too.)"""
        self._acceptors[listener.endpoint] = _Acceptor(self._pull, listener, self._spare, self._accepted)

    def forget(self, endpoint: str) -> None:
        """Cut the connection with the sender there; what it sent and was not received yet is lost."""
        self._acceptors.pop(endpoint).close()

    async def receive(self) -> list[Message]:
        """The messages of the frames that have come, in order; waits until there are any. For one task only.

        Raises:
            ZmqError, OSError: a connection cannot be accepted.
        """
        # Others run first, also when frames come without a pause.
        await asyncio.sleep(0)
        # The descriptor tells of changes alone: wait only after having seen that nothing is left.
        while not (messages := self._pull.drain()):
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            await self._waiter
        return messages

    def begin(self, epoch: int) -> None:
        self._pull.decoder.begin(epoch)

    def close(self) -> None:
        if not self._loop.is_closed() and not self._pull.socket.closed:
            self._loop.remove_reader(self._pull.socket.fileno())
        while self._acceptors:
            self._acceptors.popitem()[1].close()
        self._pull.socket.close(linger=0)

    def _accepted(self, error: Exception | None) -> None:
        self._error = self._error or error  # another sender is accepted, and the error stays
        self._on_event()  # calls of the socket may have taken the notice of a frame

    def _on_event(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        else:
            self._pull.socket.getsockopt(zmq.EVENTS)


class _Acceptor:
    """Accepts the connection of one sender, when a descriptor is free for it.

    libzmq ends the whole program where it finds none. So it gets the listener when a connection waits there and
    descriptors are free; until then the connection waits. Afterwards the listener's name is removed from the file
    system, so that no other connection comes. (libzmq cannot stop listening without cutting the connection.)
    """

    def __init__(
        self,
        pull: _PullSocket,
        listener: Listener,
        spare: SpareDescriptors,
        on_accepted: Callable[[Exception | None], None],
    ) -> None:
        """``on_accepted`` is called with the error where it cannot be accepted."""
        self._pull = pull
        self._listener = listener
        self._spare = spare
        self._on_accepted = on_accepted
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._is_bound = False
        self._listen()

    def close(self) -> None:
        self._stop()
        if self._is_bound and not self._pull.socket.closed:
            self._pull.unbind(self._listener)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener.fd, self._on_connection)

    def _stop(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if not self._is_bound:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._listener.fd)
            os.close(self._listener.fd)

    def _on_connection(self) -> None:
        if not self._spare.hold(FREE_TO_ACCEPT):
            self._loop.remove_reader(self._listener.fd)
            self._retry = self._loop.call_later(_RETRY_ACCEPT_S, self._listen)
            return
        try:
            with self._spare.lent():
                self._accept()
        except Exception as error:
            self._on_accepted(error)
        else:
            self._on_accepted(None)

    def _accept(self) -> None:
        """Hand the listener to libzmq, and wait until its thread has taken the connection, which it does at once."""
        self._loop.remove_reader(self._listener.fd)
        self._pull.bind(self._listener)
        self._is_bound = True
        waiting = select.poll()
        waiting.register(self._listener.fd, select.POLLIN)
        deadline = time.monotonic() + _MAX_ACCEPT_S
        while waiting.poll(0) and time.monotonic() < deadline:
            time.sleep(0)
        hide(self._listener)
