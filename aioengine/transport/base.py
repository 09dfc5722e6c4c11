"""The two ends of a one-way channel of frames. Implementations: ``local`` (in-process) and ``zmq``.

Asynchronous ends serve event loops (the frontend, the inline launcher); blocking ends serve the processes, whose main
threads do nothing else. A sender never waits for a reader: its backlog is bounded, and a full one is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from aioengine.protocol.messages import Message


class Sender(Protocol):
    """Sends all messages of one call as one frame, in order, without waiting."""

    def send(self, messages: list[Message]) -> None:
        """Raises ``BacklogFullError`` when the reader has not read for too long."""
        ...

    def begin(self, epoch: int) -> None:
        """Frames from now on are of this epoch."""
        ...

    def close(self) -> None: ...


class AsyncReceiver(Protocol):
    """The asynchronous reading end, for one task."""

    async def receive(self) -> list[Message]:
        """The messages of all frames that have come; waits until there are any. Cancelling it loses no frame.

        Raises:
            LostFrameError: a frame of a sender could not be decoded, so what follows it has no meaning.
        """
        ...

    def begin(self, epoch: int) -> None:
        """Frames of another epoch that were not received yet never will be."""
        ...

    def close(self) -> None: ...


class BacklogFullError(RuntimeError):
    """The other end has stopped reading."""
