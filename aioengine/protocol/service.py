"""Service: the interface of the scheduler's and the detokenizer's work, without sockets.

The caller (the loop of a process, a task of the inline launcher, a test) passes received messages to ``handle`` and
sends the messages that ``step`` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from aioengine.protocol.messages import Fact, Message

HEARTBEAT_S = 1.0
"""Maximum time between two frames to each receiver. A lost frame is noticed when a later frame arrives."""


class Outbox(NamedTuple):
    """The messages to send. The peer of the scheduler is the detokenizer, and vice versa."""

    to_peer: list[Message]
    to_frontend: list[Message]


class Service(Protocol):
    """Call ``step`` after each ``handle``, and again when ``wait_s`` has passed."""

    @property
    def facts(self) -> Mapping[str, Fact]:
        """The facts for ``Ready``."""
        ...

    def handle(self, messages: list[Message], now: float) -> None:
        """Process received messages."""
        ...

    def step(self, now: float) -> Outbox:
        """Do the work that is due. Return the messages to send."""
        ...

    def wait_s(self, now: float) -> float:
        """Return the seconds until ``step`` has work, if no message arrives. 0: it has work now."""
        ...

    def close(self) -> None:
        """Free its resources."""
        ...
