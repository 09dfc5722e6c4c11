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
        """What is sent from now on is of this epoch."""
        ...

    def close(self) -> None: ...


class AsyncReceiver(Protocol):
    """The asynchronous end: the messages of all frames that are there. Only one task reads it."""

    async def receive(self) -> list[Message]:
        """Wait until something has come. Cancelling it loses no frame. Raises ``LostFrameError``, as below."""
        ...

    def begin(self, epoch: int) -> None:
        """What is of another epoch, and was not received yet, never will be."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """The blocking end: the messages of all frames that are there."""

    def receive(self, timeout_s: float | None) -> list[Message]:
        """Wait up to ``timeout_s`` (0: do not wait, None: for ever) and return what came, [] for nothing.

        Raises:
            LostFrameError: a frame of a sender could not be decoded, and nothing behind it has a meaning.
        """
        ...

    def begin(self, epoch: int) -> None:
        """What is of another epoch, and was not received yet, never will be."""
        ...

    def close(self) -> None: ...


class BacklogFullError(RuntimeError):
    """The other end has stopped reading."""
