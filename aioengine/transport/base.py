"""The two ends of a one-way channel of frames. Implementations: ``local`` (in-process) and ``zmq``.

Asynchronous ends serve event loops (the frontend, the detokenizer); blocking ends serve the scheduler, whose thread
does nothing else. A sender never waits for a reader: its backlog is bounded, and a full one is an error.
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

    def close(self) -> None: ...


class AsyncReceiver(Protocol):
    """Gives the messages of one frame at a time. Only one task reads it; that task is never cancelled mid-frame."""

    async def receive(self) -> list[Message]: ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """The blocking end: the messages of all frames that are there."""

    def receive(self, timeout_s: float | None) -> list[Message]:
        """Wait up to ``timeout_s`` (0: do not wait, None: for ever) and return what came, [] for nothing."""
        ...

    def close(self) -> None: ...


class BacklogFullError(RuntimeError):
    """The other end has stopped reading."""
