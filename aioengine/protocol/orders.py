"""What a child is told when it starts: one line of JSON on its standard input, which then stays open for its life."""

from __future__ import annotations

from msgspec import Struct

from aioengine.config import Settings

SCHEDULER = "scheduler"
DETOKENIZER = "detokenizer"
ROLES = (SCHEDULER, DETOKENIZER)


class Endpoints(Struct, frozen=True, kw_only=True):
    """Where each role listens."""

    frontend: str
    scheduler: str
    detokenizer: str


class Orders(Struct, frozen=True, kw_only=True):
    """Who the child is and whom it talks to.

    epoch: a large random number that all frames of this start carry; a frame without it is nobody's we know.
    listener_fd: the inherited descriptor on which the child's own endpoint listens.
    board: the file in which it tells what it computes.
    parent_pid: whose end is the child's end. import_path: where the parent finds modules; the child looks there last.
    """

    role: str
    epoch: int
    endpoints: Endpoints
    listener_fd: int
    board: str
    parent_pid: int
    import_path: list[str]
    settings: Settings
