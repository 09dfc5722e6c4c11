"""The folder in which the children of an incarnation start: their sockets, logs and crash boards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from aioengine.errors import EngineStartupError
from aioengine.protocol.board import blank_board
from aioengine.protocol.messages import Role
from aioengine.protocol.orders import Orders, SecureEndpoint, encode_orders
from aioengine.settings.config import Settings
from aioengine.supervision.launchers._process_child import ProcessChild, start_child
from aioengine.transport.addresses import BOARD_SUFFIX, PrivateDirectory


class ChildFolder:
    """A private directory with an endpoint for each child. Its methods block. Only one thread at a time may use it.

    Attributes:
        inboxes: role -> endpoint at which the child listens.
    """

    def __init__(self, settings: Settings, roles: Sequence[Role]) -> None:
        """Create the directory.

        Raises:
            OSError: there is no place for it.
        """
        self._settings = settings
        self._directory = PrivateDirectory()
        self.path = Path(self._directory.path)
        self.inboxes = {role: self.endpoint(str(role)) for role in roles}

    def endpoint(self, name: str) -> str:
        return f"ipc://{self.path / name}"

    def start(
        self, role: Role, epoch: int, frontend: str | SecureEndpoint, from_frontend: SecureEndpoint | None = None
    ) -> ProcessChild:
        """Start a child with its own crash board. The arguments are fields of its ``Orders``.

        Raises:
            EngineStartupError: it could not be started.
        """
        log_path = self.path / f"{role}.log"
        board_path = log_path.with_suffix(BOARD_SUFFIX)
        scheduler = self._settings.scheduler
        try:
            board_path.write_bytes(blank_board(scheduler.depth + 1, scheduler.max_running))
        except OSError as error:
            raise EngineStartupError(f"the {role} process could not be started: {error}") from error
        orders = Orders(
            role=role,
            epoch=epoch,
            frontend=frontend,
            from_frontend=from_frontend,
            endpoints={str(role): endpoint for role, endpoint in self.inboxes.items()},
            board=str(board_path),
            parent_pid=os.getpid(),
            settings=self._settings,
        )
        popen = start_child(str(role), log_path, encode_orders(orders))
        return ProcessChild(role, popen, log_path)

    def close(self) -> None:
        """Remove the directory. May be repeated."""
        self._directory.remove()
