"""A channel inside one event loop. Frames are encoded and decoded as between processes, so no object is shared."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque

from aioengine.protocol.codec import BadFrameError, FrameDecoder, FrameEncoder
from aioengine.protocol.messages import Message
from aioengine.transport.base import BacklogFullError

MAX_FRAMES = 10_000
"""Maximum number of unread frames of a receiver."""


class LocalReceiver:
    """Receives the frames of its ``LocalSender``s. One task may read it.

    frames: unread frames. has_frames: wakes ``receive``.
    """

    def __init__(self, epoch: int) -> None:
        self.frames: deque[bytes] = deque()
        self.has_frames = asyncio.Event()
        self._decoder = FrameDecoder(epoch, time.monotonic)

    async def receive(self) -> list[Message]:
        """Return the messages of unread frames in order. Wait until there are any."""
        while not (messages := self.drain()):
            self.has_frames.clear()
            await self.has_frames.wait()
        return messages

    def drain(self) -> list[Message]:
        """Return the messages of unread frames without waiting."""
        messages: list[Message] = []
        while self.frames:
            with contextlib.suppress(BadFrameError):  # as over ZMQ: the decoder notices that a frame is missing
                messages += self._decoder.decode(self.frames.popleft())
        return messages

    def begin(self, epoch: int) -> None:
        """Drop unread and later frames of other epochs."""
        self._decoder.begin(epoch)

    def close(self) -> None:
        self.frames.clear()


class LocalSender:
    """Sends frames to one ``LocalReceiver``. A receiver may have several senders."""

    def __init__(self, receiver: LocalReceiver, epoch: int) -> None:
        self._receiver = receiver
        self._encoder = FrameEncoder(epoch)

    def send(self, messages: list[Message]) -> None:
        """Send ``messages`` as one frame.

        Raises:
            BacklogFullError: the receiver has not read for too long.
        """
        frames = self._receiver.frames
        if len(frames) >= MAX_FRAMES:
            raise BacklogFullError(f"the other end has not read for too long: {len(frames)} frames wait for it")
        frames.append(self._encoder.encode(messages))
        self._receiver.has_frames.set()

    def begin(self, epoch: int) -> None:
        """Send later frames in this epoch."""
        self._encoder.begin(epoch)
