"""The two ends of a one-way channel of frames. ``local`` works inside an event loop, ``zmq`` between processes.

Asynchronous ends are for event loops (the frontend and the inline launcher). Blocking ends are for child processes. A
sender never waits for its receiver. Its backlog is bounded, and a full backlog is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aioengine.protocol.messages import Message


class Sender(Protocol):
    """Sends all messages of one call in one frame, in order, without waiting."""

    def send(self, messages: list[Message]) -> None:
        """Send messages. Raise BacklogFullError if the receiver has not read for too long."""
        ...

    def begin(self, epoch: int) -> None:
        """Send later frames in this epoch."""
        ...

    def close(self) -> None: ...


class AsyncReceiver(Protocol):
    """The asynchronous receiver, for one task."""

    async def receive(self) -> list[Message]:
        """Return the messages of all received frames. Wait until there are any. Cancelling it loses no frame.

        Raises:
            LostFrameError: a frame of a sender could not be decoded, so later frames have no meaning.
        """
        ...

    def begin(self, epoch: int) -> None:
        """Drop unread and later frames of other epochs."""
        ...

    def close(self) -> None: ...


class BacklogFullError(RuntimeError):
    """The receiver has stopped reading."""
