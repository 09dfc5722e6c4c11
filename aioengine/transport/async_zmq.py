"""Frames over ZMQ sockets for an event loop.

Child processes do not import this module, because importing asyncio takes a third of the time of their start.
"""

from __future__ import annotations

import asyncio
from collections import deque

import zmq

from aioengine.protocol.messages import Message
from aioengine.protocol.orders import SecureEndpoint
from aioengine.transport.base import BacklogFullError
from aioengine.transport.zmq import MAX_UNSENT, Context, PullSocket, ZmqSender

_RETRY_S = 0.01


class ListeningSender(ZmqSender):
    """A sender that listens at its endpoint. Frames wait here until their receiver has connected."""

    _retry: asyncio.TimerHandle | None = None

    def __init__(self, context: Context, endpoint: SecureEndpoint, epoch: int, *, receiver: str) -> None:
        super().__init__(context, endpoint, epoch, receiver=receiver)
        self._unsent: deque[bytes] = deque()

    def close(self, linger_s: float = 0.0) -> None:
        if self._retry is not None:
            self._retry.cancel()
        super().close(linger_s)

    def _offer(self, frame: bytes) -> None:
        self._unsent.append(frame)
        if self._retry is None:
            self._send_unsent()

    def _send_unsent(self) -> None:
        self._retry = None
        try:
            while self._unsent:
                super()._offer(self._unsent[0])
                self._unsent.popleft()
        except BacklogFullError:
            if len(self._unsent) > MAX_UNSENT:
                raise
            self._retry = asyncio.get_running_loop().call_later(_RETRY_S, self._send_unsent)


class AsyncZmqReceiver(PullSocket):
    """The receiver for an event loop of any kind.

    It watches the descriptor of the socket and receives all frames at once, which costs less than one future per frame.
    ``receive`` takes frames only while it runs, so cancelling it loses no frame.
    """

    def __init__(self, context: Context, epoch: int) -> None:
        super().__init__(context, epoch)
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._loop.add_reader(self._socket.fileno(), self._on_event)

    def attach(self, endpoint: str | SecureEndpoint) -> str:
        address = super().attach(endpoint)
        self._on_event()  # the call may have consumed the event of a frame
        return address

    async def receive(self) -> list[Message]:
        """Return the messages of received frames in order. Wait until there are any. For one task only.

        Raises:
            LostFrameError: a frame of a sender is missing, so later frames have no meaning.
        """
        await asyncio.sleep(0)  # other tasks run first, even if frames arrive without a pause
        # The descriptor only reports changes, so wait only if no frame is left.
        while not (messages := self._drain()):
            self._waiter = self._loop.create_future()
            await self._waiter
        return messages

    def close(self) -> None:
        if not self._loop.is_closed() and not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
        super().close()

    def _on_event(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        else:
            self._socket.getsockopt(zmq.EVENTS)  # the descriptor reports the next frame only after this call
