"""A channel inside one event loop, with the ends of any other channel.

Frames are encoded and decoded as between processes, so what passes here passes there, and the two sides share no
object.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

from aioengine.protocol.codec import BadFrameError, FrameDecoder, FrameEncoder
from aioengine.transport.base import BacklogFullError

if TYPE_CHECKING:
    from aioengine.protocol.messages import Message

MAX_FRAMES = 10_000


class _Queue:
    """The frames on their way, and who waits for one."""

    def __init__(self, max_frames: int) -> None:
        self.frames: deque[bytes] = deque()
        self.max_frames = max_frames
        self.waiter: asyncio.Future[None] | None = None


class LocalSender:
    """The end that writes."""

    def __init__(self, queue: _Queue, epoch: int) -> None:
        self._queue = queue
        self._encoder = FrameEncoder(epoch)

    def send(self, messages: list[Message]) -> None:
        """Send ``messages`` as one frame.

        Raises:
            BacklogFullError: the reader has not read for too long.
        """
        queue = self._queue
        if len(queue.frames) >= queue.max_frames:
            raise BacklogFullError(f"the other end has not read for too long: {len(queue.frames)} frames wait for it")
        queue.frames.append(bytes(self._encoder.encode(messages)))
        if queue.waiter is not None and not queue.waiter.done():
            queue.waiter.set_result(None)

    def begin(self, epoch: int) -> None:
        self._encoder.begin(epoch)

    def close(self) -> None:
        """Nothing to give back."""


class LocalReceiver:
    """The end that reads; for one task. ``num_bad_frames`` could not be decoded and were dropped."""

    def __init__(self, queue: _Queue, epoch: int) -> None:
        self.num_bad_frames = 0
        self._queue = queue
        self._decoder = FrameDecoder(epoch, clock=time.monotonic)

    async def receive(self) -> list[Message]:
        """The messages of the frames that have come, in order; waits until there are any."""
        while not (messages := self.drain()):
            self._queue.waiter = asyncio.get_running_loop().create_future()
            await self._queue.waiter
        return messages

    def drain(self) -> list[Message]:
        """What has come, without waiting."""
        messages: list[Message] = []
        while self._queue.frames:
            try:
                messages += self._decoder.decode(self._queue.frames.popleft())
            except BadFrameError:
                self.num_bad_frames += 1
        return messages

    def begin(self, epoch: int) -> None:
        self._decoder.begin(epoch)

    def close(self) -> None:
        self._queue.frames.clear()


class LocalChannel:
    """One reader and any number of senders."""

    def __init__(self, epoch: int, *, max_frames: int = MAX_FRAMES) -> None:
        self._epoch = epoch
        self._queue = _Queue(max_frames)
        self.receiver = LocalReceiver(self._queue, epoch)

    def sender(self) -> LocalSender:
        return LocalSender(self._queue, self._epoch)
