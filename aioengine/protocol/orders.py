"""What a child reads from its standard input when it starts; the input then stays open for its life.

First the import path (``bootstrap`` says in which form), then the orders as one line of JSON.
"""

from __future__ import annotations

import json

import msgspec
from msgspec import Struct

from aioengine.config import Settings

SCHEDULER = "scheduler"
DETOKENIZER = "detokenizer"
ROLES = (SCHEDULER, DETOKENIZER)


class Endpoints(Struct, frozen=True, kw_only=True):
    """Where each role listens."""

    frontend: str  # one for each child
    scheduler: str
    detokenizer: str


class Orders(Struct, frozen=True, kw_only=True):
    """Who the child is and whom it talks to.

    epoch: a large random number that all frames of this start carry; a frame without it is nobody's we know.
    listener_fd: the inherited descriptor on which the child's own endpoint listens.
    board: the file in which it tells what it computes.
    parent_pid: whose end is the child's end.
    """

    role: str
    epoch: int
    endpoints: Endpoints
    listener_fd: int
    board: str
    parent_pid: int
    settings: Settings


def encode_orders(orders: Orders) -> bytes:
    """One line of JSON. The standard library escapes what msgspec refuses: paths need not be UTF-8."""
    return json.dumps(msgspec.to_builtins(orders)).encode()


def decode_orders(line: bytes) -> Orders:
    return msgspec.convert(json.loads(line), Orders)
