"""Frames over ZMQ PUSH and PULL sockets: one listening reader, any number of senders.

A PULL socket takes over a listening descriptor (see ``addresses``); a PUSH socket connects. No send waits: frames that
the socket does not take are kept in a bounded backlog.
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
# Frames that ZMQ itself holds for a slow reader, at each end.
_HIGH_WATER_MARK = 1000
_RECONNECT_MS = 10
# File descriptors that are free when libzmq accepts connections: it needs one for each.
FREE_TO_ACCEPT = 4
_MAX_ACCEPT_S = 1.0
_RETRY_ACCEPT_S = 0.05
# Frames that one call takes at most, so that a flood does not keep the caller from its other work.
_MAX_FRAMES_AT_ONCE = 256
_MAX_BYTES_AT_ONCE = 8 * 1024 * 1024  # which take some milliseconds to copy and to decode


def end_context(context: Context) -> None:
    """Close a context and its sockets, without waiting for messages that were not sent.

    This thread takes no signal meanwhile: pyzmq gives up when a signal interrupts it, and the context's five
    descriptors would stay open for ever.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        context.destroy(linger=0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ZmqSender:
    """The writing end for blocking loops, which call ``flush`` again while there is a backlog."""

    def __init__(
        self,
        context: Context,
        endpoint: str,
        epoch: int,
        *,
        reader: str = "the other end",
        max_backlog: int = MAX_BACKLOG_BYTES,
    ) -> None:
        """``reader``: the name of the reader in errors. ``max_backlog``: bytes that may wait here for it."""
        self._reader = reader
        self._encoder = FrameEncoder(epoch, max_bytes_of_several=_MAX_BYTES_AT_ONCE)
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._max_backlog = max_backlog
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 0)  # else garbage collection would wait for a reader that is gone
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 0)  # the reader accepts when it can
        self._socket.connect(endpoint)

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    def send(self, messages: list[Message]) -> None:
        """Send ``messages`` as one frame, or as several where one would be larger than readers take at once.

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
        """Frames from now on are of this epoch; the backlog is sent before them."""
        self._encoder.begin(epoch)

    def flush(self) -> bool:
        """Hand the backlog to the socket; returns whether it took all of it."""
        while self._backlog:
            if not self._offer(self._backlog[0]):
                return False
            self._backlog_bytes -= len(self._backlog.popleft())
        return True

    def close(self, linger_s: float = 0.0) -> None:
        """Close. The end of the context waits up to ``linger_s`` for frames that the socket took."""
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
    """The writing end for an event loop, which sends the backlog by itself."""

    _loop: asyncio.AbstractEventLoop | None = None  # while it watches the socket

    def send(self, messages: list[Message]) -> None:
        super().send(messages)
        if self.has_backlog and self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.fileno(), self._on_event)
            self._on_event()  # the descriptor reports changes only, and one may have come before it was watched

    def close(self, linger_s: float = 0.0) -> None:
        self._unwatch()
        super().close(linger_s)

    def _on_event(self) -> None:
        if self.flush():
            self._unwatch()

    def _unwatch(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._socket.fileno())


class _PullSocket:
    """The socket of both readers: it takes the frames that have come, and drops those that cannot be decoded."""

    def __init__(self, context: Context, epoch: int) -> None:
        self.num_bad_frames = 0
        self._decoder = FrameDecoder(epoch, clock=time.monotonic)
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)

    def begin(self, epoch: int) -> None:
        """Frames of another epoch are dropped from now on."""
        self._decoder.begin(epoch)

    def bind(self, listener: Listener) -> None:
        """Accept connections from now on; libzmq takes over the descriptor."""
        self._socket.setsockopt(zmq.USE_FD, listener.fd)
        self._socket.bind(listener.endpoint)

    def unbind(self, listener: Listener) -> None:
        """Accept no more, and end the connections that were accepted there."""
        if not self._socket.closed:
            self._socket.unbind(listener.endpoint)

    def close(self) -> None:
        self._socket.close(linger=0)

    def _drain(self) -> list[Message]:
        """The messages of all frames that have come, up to a limit of frames; [] only when none is left."""
        messages: list[Message] = []
        num_frames = num_bytes = 0
        with contextlib.suppress(zmq.Again):
            while (num_frames < _MAX_FRAMES_AT_ONCE and num_bytes < _MAX_BYTES_AT_ONCE) or not messages:
                frame = self._socket.recv(zmq.NOBLOCK)
                num_frames += 1
                num_bytes += len(frame)
                try:
                    messages += self._decoder.decode(frame)
                except BadFrameError as error:
                    self.num_bad_frames += 1
                    if self.num_bad_frames == 1:
                        log(logger, logging.ERROR, "dropped a frame, later ones are only counted: %s", error)
        return messages


class ZmqReceiver(_PullSocket):
    """The reading end for a thread that does nothing else."""

    def __init__(self, context: Context, listener: Listener, epoch: int, *, wake_fd: int | None = None) -> None:
        """``wake_fd``: another descriptor that ends a wait when it is readable."""
        super().__init__(context, epoch)
        self.bind(listener)
        self._watched: list[tuple[zmq.Socket[bytes] | int, int]] = [(self._socket, zmq.POLLIN)]
        if wake_fd is not None:
            self._watched.append((wake_fd, zmq.POLLIN))

    def receive(self, timeout_s: float | None) -> list[Message]:
        """The messages of all frames that have come; waits up to ``timeout_s`` for one (None: for ever).

        Raises:
            LostFrameError: a frame of a sender could not be decoded, so what follows it has no meaning.
        """
        messages = self._drain()
        if messages or timeout_s == 0:
            return messages
        zmq.zmq_poll(self._watched, -1 if timeout_s is None else math.ceil(timeout_s * 1000))
        return self._drain()


class AsyncZmqReceiver(_PullSocket):
    """The reading end for an event loop of any kind.

    It watches the descriptor of the socket and takes all frames that have come at once, which costs less than a future
    for each frame. ``receive`` takes frames only while it runs, so cancelling it loses none.
    """

    def __init__(self, context: Context, epoch: int, *, spare: SpareDescriptors | None = None) -> None:
        """``spare``: freed for the moment in which a connection is accepted."""
        super().__init__(context, epoch)
        self._spare = spare or SpareDescriptors()
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._acceptors: dict[str, _Acceptor] = {}
        self._error: Exception | None = None
        self._loop.add_reader(self._socket.fileno(), self._on_event)

    def expect(self, listener: Listener) -> None:
        """Accept one sender there, and take over the descriptor. (Others that connect at that moment come in, too.)"""
        self._acceptors[listener.endpoint] = _Acceptor(self, listener, self._spare, self._accepted)

    def forget(self, endpoint: str) -> None:
        """Cut the connection with the sender there; what it sent and was not received yet is lost."""
        self._acceptors.pop(endpoint).close()

    async def receive(self) -> list[Message]:
        """The messages of the frames that have come, in order; waits until there are any. For one task only.

        Raises:
            LostFrameError: a frame of a sender could not be decoded, so what follows it has no meaning.
            ZmqError, OSError: a connection cannot be accepted.
        """
        await asyncio.sleep(0)  # other tasks run first, even when frames come without a pause
        # The descriptor reports changes only: wait only when nothing is left.
        while not (messages := self._drain()):
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            await self._waiter
        return messages

    def close(self) -> None:
        if not self._loop.is_closed() and not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
        while self._acceptors:
            self._acceptors.popitem()[1].close()
        super().close()

    def _accepted(self, error: Exception | None) -> None:
        self._error = self._error or error  # another sender is accepted, and the error stays
        self._on_event()  # calls of the socket may have taken the event of a frame

    def _on_event(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        else:
            self._socket.getsockopt(zmq.EVENTS)


class _Acceptor:
    """Accepts the connection of one sender, once a file descriptor is free for it.

    libzmq aborts the whole program where none is free. So it gets the listener only when a connection waits there and
    descriptors are free; until then the connection waits. Afterwards the listener's name is removed from the file
    system, so that no other connection comes. (libzmq cannot stop listening without cutting the connection.)
    """

    def __init__(
        self,
        socket: _PullSocket,
        listener: Listener,
        spare: SpareDescriptors,
        on_accepted: Callable[[Exception | None], None],
    ) -> None:
        """``on_accepted`` receives the error where the connection cannot be accepted."""
        self._socket = socket
        self._listener = listener
        self._spare = spare
        self._on_accepted = on_accepted
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._is_bound = False
        self._listen()

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if self._is_bound:
            self._socket.unbind(self._listener)
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._listener.fd)
        os.close(self._listener.fd)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener.fd, self._on_connection)

    def _on_connection(self) -> None:
        self._loop.remove_reader(self._listener.fd)
        if not self._spare.hold(FREE_TO_ACCEPT):
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
        self._socket.bind(self._listener)
        self._is_bound = True
        waiting = select.poll()
        waiting.register(self._listener.fd, select.POLLIN)
        deadline = time.monotonic() + _MAX_ACCEPT_S
        while waiting.poll(0) and time.monotonic() < deadline:
            time.sleep(0)
        hide(self._listener)
