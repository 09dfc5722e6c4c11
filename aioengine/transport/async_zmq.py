"""Frames over ZMQ sockets for an event loop.

Child processes do not import this module, because importing asyncio takes a third of the time of their start.
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from typing import TYPE_CHECKING

import zmq

from aioengine.file_descriptors import SpareDescriptors
from aioengine.transport.addresses import Listener, hide
from aioengine.transport.zmq import PullSocket, ZmqSender

if TYPE_CHECKING:
    from aioengine.protocol.messages import Message
    from aioengine.transport.zmq import Context

FREE_TO_ACCEPT = 4
"""Number of free file descriptors when libzmq accepts a connection. Each connection needs one."""
_MAX_ACCEPT_S = 1.0
_RETRY_ACCEPT_S = 0.05


class AsyncZmqSender(ZmqSender):
    """The sender for an event loop. It sends its backlog by itself."""

    _loop: asyncio.AbstractEventLoop | None = None  # set while it watches the socket

    def send(self, messages: list[Message]) -> None:
        super().send(messages)
        if self._backlog and self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.fileno(), self._on_event)
            self._on_event()  # the descriptor reports only changes, and the last change may be over

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


class AsyncZmqReceiver(PullSocket):
    """The receiver for an event loop of any kind.

    It watches the descriptor of the socket and receives all frames at once, which costs less than one future per frame.
    ``receive`` takes frames only while it runs, so cancelling it loses no frame.
    """

    def __init__(self, context: Context, epoch: int, *, spare: SpareDescriptors | None = None) -> None:
        """spare: descriptors that are freed while a connection is accepted."""
        super().__init__(context, epoch)
        self.spare = spare or SpareDescriptors()
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._acceptors: dict[str, _Acceptor] = {}
        self._error: Exception | None = None
        self._loop.add_reader(self._socket.fileno(), self._on_event)

    def expect(self, listener: Listener) -> None:
        """Take over a listener, and accept the connection of one sender.

        Other connections that arrive at the same time are accepted too.
        """
        self._acceptors[listener.endpoint] = _Acceptor(self, listener)

    def forget(self, endpoint: str) -> None:
        """End the connection of a sender. Its unread frames are lost."""
        self._acceptors.pop(endpoint).close()

    async def receive(self) -> list[Message]:
        """Return the messages of received frames in order. Wait until there are any. For one task only.

        Raises:
            LostFrameError: a frame of a sender could not be decoded, so later frames have no meaning.
            ZmqError, OSError: a connection cannot be accepted.
        """
        await asyncio.sleep(0)  # other tasks run first, even if frames arrive without a pause
        # The descriptor only reports changes, so wait only if no frame is left.
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

    def accepted(self, error: Exception | None) -> None:
        """Record that a connection was accepted, or could not be accepted."""
        self._error = self._error or error
        self._on_event()  # calls of the socket may have consumed the event of a frame

    def _on_event(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        else:
            self._socket.getsockopt(zmq.EVENTS)


class _Acceptor:
    """Accepts the connection of one sender when a file descriptor is free.

    libzmq aborts the program if no descriptor is free. So it gets the listener only when a connection waits and
    descriptors are free. Afterwards the path of the listener is removed, so that no other connection arrives. (libzmq
    cannot stop listening without ending the connection.)
    """

    def __init__(self, receiver: AsyncZmqReceiver, listener: Listener) -> None:
        self._receiver = receiver
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._is_bound = False
        self._listen()

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if self._is_bound:
            self._receiver.unbind(self._listener)
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._listener.fd)
        os.close(self._listener.fd)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener.fd, self._on_connection)

    def _on_connection(self) -> None:
        self._loop.remove_reader(self._listener.fd)
        if not self._receiver.spare.hold(FREE_TO_ACCEPT):
            self._retry = self._loop.call_later(_RETRY_ACCEPT_S, self._listen)
            return
        failure = None
        try:
            with self._receiver.spare.lent():
                self._accept()
        except Exception as error:
            failure = error
        self._receiver.accepted(failure)

    def _accept(self) -> None:
        """Pass the listener to libzmq, and wait until its thread has accepted the connection."""
        self._receiver.bind(self._listener)
        self._is_bound = True
        waiting = select.poll()
        waiting.register(self._listener.fd, select.POLLIN)
        deadline = time.monotonic() + _MAX_ACCEPT_S
        while waiting.poll(0) and time.monotonic() < deadline:
            time.sleep(0)
        hide(self._listener)
