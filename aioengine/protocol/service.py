"""What a process does, without I/O: the scheduler's and the detokenizer's work have this one shape.

Whoever runs a service (the loop of a process, a task of the inline launcher, a test) gives it the messages that came
and sends the messages that it gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from aioengine.protocol.messages import NewEpoch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aioengine.protocol.messages import Message

HEARTBEAT_S = 1.0
"""A service says something to everybody at least so often: a lost frame is missed when others come behind it."""


class Outbox(NamedTuple):
    """What a service has to say. The peer of the scheduler is the detokenizer, and the other way round."""

    to_peer: list[Message]
    to_frontend: list[Message]


def new_epoch_in(messages: Iterable[Message]) -> NewEpoch | None:
    """The beginning of another epoch; all that came together with it is of the one that is over."""
    return next((message for message in messages if isinstance(message, NewEpoch)), None)


class Service(Protocol):
    """Call ``step`` after each ``handle``, and again when ``wait_s`` has passed."""

    @property
    def facts(self) -> Mapping[str, str | int | float | bool]:
        """What ``Ready`` tells about it."""
        ...

    def handle(self, messages: list[Message], now: float) -> None:
        """Take in what came."""
        ...

    def step(self, now: float) -> Outbox:
        """Do what is due."""
        ...

    def wait_s(self, now: float) -> float:
        """So long there is nothing to do unless a message comes; 0: ``step`` has work."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...
