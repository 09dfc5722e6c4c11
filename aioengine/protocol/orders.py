"""The orders that a child reads from its standard input when it starts; the input stays open for its life.

First comes the import path (its form: ``bootstrap``), then the orders as one line of JSON.
"""

from __future__ import annotations

import json

import msgspec
from msgspec import Struct

from aioengine.protocol.messages import DETOKENIZER, SCHEDULER, Role
from aioengine.settings.config import Settings

ROLES = (SCHEDULER, DETOKENIZER)
"""The children of a replica on one device."""


class Orders(Struct, frozen=True, kw_only=True):
    """The child's role and the ends of its channels.

    epoch: a large random number in all frames of this start; frames without it are ignored.
    frontend: the endpoint at which the frontend listens to this child alone.
    endpoints: str(role) -> the endpoint at which the child of that role listens.
    listener_fd: the inherited descriptor on which the child's own endpoint listens.
    board: the file of its crash board.
    parent_pid: the process with which the child ends.
    """

    role: Role
    epoch: int
    frontend: str
    endpoints: dict[str, str]
    listener_fd: int
    board: str
    parent_pid: int
    settings: Settings

    def endpoint(self, role: Role) -> str:
        """Where the child of this role listens."""
        return self.endpoints[str(role)]


def encode_orders(orders: Orders) -> bytes:
    """One line of JSON. The standard library escapes what msgspec refuses: paths need not be UTF-8."""
    return json.dumps(msgspec.to_builtins(orders)).encode()


def decode_orders(line: bytes) -> Orders:
    return msgspec.convert(json.loads(line), Orders)
