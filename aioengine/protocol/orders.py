"""The orders that a child process reads from its standard input when it starts. The input stays open until it ends.

The import path comes first (see ``bootstrap``), then the orders as one line of JSON.
"""

from __future__ import annotations

import json

import msgspec

from aioengine.protocol.messages import DETOKENIZER, RUNNER, SCHEDULER, Role
from aioengine.settings.config import Settings

ROLES = (SCHEDULER, DETOKENIZER)
"""The child processes of a replica on one device."""


def roles_of(settings: Settings) -> tuple[Role, ...]:
    """Return the child processes of a replica. Rank 0 is in the scheduler process."""
    ranks = settings.runner.ranks
    return ROLES if ranks is None else (*ROLES, *(Role(RUNNER, rank) for rank in range(1, ranks.size)))


class SecureEndpoint(msgspec.Struct, frozen=True):
    """One end of a link between machines: TCP with CURVE, which encrypts and authenticates the frames.

    address: "tcp://host:port"; of the listening end, it may be "tcp://host:*".
    public_key, secret_key: of this end.
    server_key: the public key of the listening end; "": this is the listening end.
    """

    address: str
    public_key: str
    secret_key: str
    server_key: str = ""


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """The role of a child process, its settings and its channels.

    epoch: a large random number in all frames of this incarnation; other frames are ignored.
    frontend: the endpoint at which this child listens, to send to the frontend; on another machine, the frontend's.
    from_frontend: the endpoint at which the frontend sends to this child; None: it sends to the endpoint of the child.
    endpoints: str(role) -> the endpoint of the child with this role.
    board: path of its crash board. parent_pid: the child exits when this process ends.
    """

    role: Role
    epoch: int
    frontend: str | SecureEndpoint
    endpoints: dict[str, str]
    board: str
    parent_pid: int
    settings: Settings
    from_frontend: SecureEndpoint | None = None


def encode_orders(orders: Orders) -> bytes:
    """Return one line of JSON. Uses the standard library, because msgspec refuses paths that are not UTF-8."""
    return json.dumps(msgspec.to_builtins(orders)).encode()


def decode_orders(line: bytes) -> Orders:
    return msgspec.convert(json.loads(line), Orders)
