"""Frames over ZMQ PUSH and PULL sockets: one receiver, any number of senders. For blocking loops; for event loops, see
``async_zmq``.

On one machine, only child processes listen, and other sockets connect to them, at any time. So a child also listens to
send frames to the frontend: libzmq aborts a process that listens and has no free file descriptor, and the user's
process may run out of them. Only a child that listens waits in a send: for its receiver.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import time

import zmq

from aioengine.logs import log
from aioengine.protocol.codec import MAX_FRAME_BYTES, BadFrameError, FrameDecoder, FrameEncoder, FrameTooLargeError
from aioengine.protocol.messages import Message
from aioengine.protocol.orders import SecureEndpoint
from aioengine.transport.base import BacklogFullError

Context = zmq.Context[zmq.Socket[bytes]]
ZmqError = zmq.ZMQError

logger = logging.getLogger(__name__)

MAX_UNSENT = 100_000
"""Number of frames that the socket of a sender keeps for a slow receiver."""
_MAX_UNREAD = 1000
"""Number of frames that the socket of a receiver keeps."""
_RECONNECT_MS = 10
_MAX_WAIT_MS = 30_000
"""How long a sender that listens waits for its receiver to connect, or to read if too many frames are unsent."""
_MAX_HANDSHAKE_BYTES = 4096
"""A sender receives only handshakes. libzmq would store any number of bytes from a stranger who has no key."""
_MAX_FRAMES_AT_ONCE = 256
_MAX_BYTES_AT_ONCE = 8 * 1024 * 1024
"""Limits of one ``receive``, so that a flood of frames does not block the caller. Copying and decoding 8 MiB takes some
milliseconds."""


def end_context(context: Context) -> None:
    """Close a context and its sockets. Unsent messages are dropped.

    Signals are blocked in this thread meanwhile. pyzmq gives up if a signal interrupts it, and the five descriptors of
    the context would stay open.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        context.destroy(linger=0)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def attach(socket: zmq.Socket[bytes], endpoint: str | SecureEndpoint, *, listens: bool = False) -> str:
    """Connect a socket to an endpoint, or listen at it. Return its address. listens: at an endpoint of this machine.

    Raises:
        ZmqError: the address cannot be used.
    """
    if isinstance(endpoint, str):
        (socket.bind if listens else socket.connect)(endpoint)
        return endpoint
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, endpoint.public_key)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, endpoint.secret_key)
    if endpoint.server_key:
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, endpoint.server_key)
        socket.connect(endpoint.address)
    else:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.bind(endpoint.address)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


class ZmqSender:
    """Sends frames. address: of its endpoint."""

    def __init__(
        self,
        context: Context,
        endpoint: str | SecureEndpoint,
        epoch: int,
        *,
        receiver: str = "the other end",
        listens: bool = False,
    ) -> None:
        """receiver: its name, for errors. listens: the receiver connects to this endpoint of this machine."""
        self._receiver = receiver
        clock = None if isinstance(endpoint, str) else time.monotonic
        self._encoder = FrameEncoder(epoch, max_bytes_of_several=_MAX_BYTES_AT_ONCE, clock=clock)
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        self._socket.setsockopt(zmq.LINGER, 0)  # otherwise garbage collection would wait for a dead receiver
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        if not isinstance(endpoint, str):
            self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_HANDSHAKE_BYTES)
        self._socket.setsockopt(zmq.SNDTIMEO, _MAX_WAIT_MS if listens else 0)
        self.address = attach(self._socket, endpoint, listens=listens)

    def send(self, messages: list[Message]) -> None:
        """Send ``messages`` as one frame, or as several if one frame would be larger than the maximum.

        Raises:
            BacklogFullError: the receiver has not read for too long.
            FrameTooLargeError: a single message is larger than the maximum.
        """
        try:
            frame = self._encoder.encode(messages)
        except FrameTooLargeError:
            if len(messages) == 1:
                raise
            self.send(messages[: len(messages) // 2])
            self.send(messages[len(messages) // 2 :])
            return
        self._offer(frame)

    def begin(self, epoch: int) -> None:
        """Send later frames in this epoch."""
        self._encoder.begin(epoch)

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket. The end of the context waits up to ``linger_s`` for frames in the socket."""
        self._socket.close(linger=round(linger_s * 1000))

    def _offer(self, frame: bytes) -> None:
        try:
            self._socket.send(frame)
        except zmq.Again:
            text = f"{self._receiver} has not read for too long: {MAX_UNSENT} frames wait for it"
            raise BacklogFullError(text) from None


class PullSocket:
    """The socket of both receivers. It drops frames that cannot be decoded."""

    def __init__(self, context: Context, epoch: int) -> None:
        self.num_bad_frames = 0
        self._decoder = FrameDecoder(epoch, time.monotonic)
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, _MAX_UNREAD)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)

    def begin(self, epoch: int) -> None:
        """Drop unread and later frames of other epochs."""
        self._decoder.begin(epoch)

    def attach(self, endpoint: str | SecureEndpoint) -> str:
        """Also receive from a sender that listens at this endpoint, or from another machine. Return its address."""
        return attach(self._socket, endpoint)

    def disconnect(self, endpoint: str) -> None:
        """End the connection to a sender. Its unread frames are lost."""
        self._socket.disconnect(endpoint)

    def close(self) -> None:
        self._socket.close(linger=0)

    def _drain(self) -> list[Message]:
        """Return the messages of received frames, up to a limit. Return [] only if no frame is left."""
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
                        log(logger, logging.ERROR, "dropped a frame, later frames are only counted: %s", error)
        return messages


class ZmqReceiver(PullSocket):
    """The receiver for a blocking loop."""

    def __init__(self, context: Context, endpoint: str, epoch: int, *, wake_fd: int | None = None) -> None:
        """wake_fd: a descriptor that also ends a wait when it is readable."""
        super().__init__(context, epoch)
        self._socket.bind(endpoint)
        self._watched: list[tuple[zmq.Socket[bytes] | int, int]] = [(self._socket, zmq.POLLIN)]
        if wake_fd is not None:
            self._watched.append((wake_fd, zmq.POLLIN))

    def receive(self, timeout_s: float | None) -> list[Message]:
        """Return the messages of received frames. Wait up to ``timeout_s`` for a frame; None: without a limit.

        Raises:
            LostFrameError: a frame of a sender is missing, so later frames have no meaning.
        """
        messages = self._drain()
        if messages or timeout_s == 0:
            return messages
        zmq.zmq_poll(self._watched, -1 if timeout_s is None else math.ceil(timeout_s * 1000))
        return self._drain()
