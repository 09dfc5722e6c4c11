"""Service: the interface of the scheduler's and the detokenizer's work, without I/O.

The caller (the loop of a process, a task of the inline launcher, a test) passes received messages to ``handle`` and
sends the messages that ``step`` returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioengine.protocol.messages import Message

HEARTBEAT_S = 1.0
"""A service sends to each of its receivers at least this often: a lost frame is noticed when a later one comes."""


class Outbox(NamedTuple):
    """The messages to send. The peer of the scheduler is the detokenizer, and vice versa."""

    to_peer: list[Message]
    to_frontend: list[Message]


class Service(Protocol):
    """Call ``step`` after each ``handle``, and again when ``wait_s`` has passed."""

    @property
    def facts(self) -> Mapping[str, str | int | float | bool]:
        """Its facts for ``Ready``."""
        ...

    def handle(self, messages: list[Message], now: float) -> None:
        """Take in received messages."""
        ...

    def step(self, now: float) -> Outbox:
        """Do the work that is due; returns the messages to send."""
        ...

    def wait_s(self, now: float) -> float:
        """How long there is nothing to do unless a message comes; 0: ``step`` has work."""
        ...

    def close(self) -> None:
        """Free its resources."""
        ...
