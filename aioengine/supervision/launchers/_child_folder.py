"""The folder in which the children of an incarnation start: their sockets, logs and crash boards."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from aioengine.errors import EngineStartupError
from aioengine.protocol.board import blank_board
from aioengine.protocol.messages import DETOKENIZER
from aioengine.protocol.orders import Orders, SecureEndpoint, encode_orders
from aioengine.supervision.launchers._process_child import ProcessChild, start_child
from aioengine.transport.addresses import BOARD_SUFFIX, Listener, PrivateDirectory, listen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioengine.protocol.messages import Role
    from aioengine.settings.config import Settings


class ChildFolder:
    """A private directory with an inbox for each child. Its methods block. Only one thread at a time may use it.

    Attributes:
        path: of the directory.
        inboxes: role -> endpoint at which the child listens.
    """

    def __init__(self, settings: Settings, roles: Sequence[Role]) -> None:
        """Create the directory, and listen at the inboxes.

        Raises:
            OSError: there is no place for the directory or a socket.
        """
        self._settings = settings
        self._listeners: dict[str, Listener] = {}  # endpoint -> its listener, while this object owns it
        with contextlib.ExitStack() as closing:
            directory = PrivateDirectory()
            closing.callback(directory.remove)
            closing.callback(self._close_listeners)
            self.path = Path(directory.path)
            self.inboxes = {role: self.listen(str(role)) for role in roles}
            self._closing = closing.pop_all()

    def listen(self, name: str) -> str:
        """Listen at a new endpoint. Return it."""
        listener = listen(str(self.path), name)
        self._listeners[listener.endpoint] = listener
        return listener.endpoint

    def take(self, endpoint: str) -> Listener:
        """Return the listener of an endpoint. The caller must close it."""
        return self._listeners.pop(endpoint)

    def start(
        self,
        role: Role,
        epoch: int,
        frontend: str | SecureEndpoint,
        from_frontend: SecureEndpoint | None = None,
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
            listener_fd=self._listeners[self.inboxes[role]].fd,
            board=str(board_path),
            parent_pid=os.getpid(),
            settings=self._settings,
        )
        popen = start_child(str(role), log_path, encode_orders(orders), (orders.listener_fd,))
        return ProcessChild(role, popen, log_path)

    def close_inboxes(self) -> None:
        """Close the listeners that no later child needs. Only the detokenizer may be started again."""
        for role, endpoint in self.inboxes.items():
            if role != DETOKENIZER:
                os.close(self.take(endpoint).fd)

    def close(self) -> None:
        """Close all listeners and remove the directory. May be repeated."""
        self._closing.close()

    def _close_listeners(self) -> None:
        while self._listeners:
            os.close(self._listeners.popitem()[1].fd)
