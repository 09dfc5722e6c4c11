"""The interface of launchers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioengine.protocol.messages import Role
    from aioengine.settings.config import Settings
    from aioengine.supervision.launchers._process_child import ProcessChild
    from aioengine.supervision.launchers.inline import InlineChild
    from aioengine.transport.base import AsyncReceiver, Sender

    RunningChild = ProcessChild | InlineChild
    """A child after its start, running or not."""

KILL_WAIT_S = 1.0
"""Maximum time from the kill of a process to its exit. Its device memory is free only after the exit."""


class Launcher(Protocol):
    """Opens the channels and starts the children, on one event loop. It is closed after the exit of the children."""

    def __init__(self, settings: Settings, roles: Sequence[Role]) -> None:
        """roles: one child is started for each role. SCHEDULER and DETOKENIZER are required."""
        ...

    @property
    def children(self) -> Sequence[RunningChild]:
        """The newest child of each role, also if a launch has failed. Always the same list."""
        ...

    @property
    def sender(self) -> Sender:
        """Sends to the scheduler. Set by ``launch``."""
        ...

    @property
    def receiver(self) -> AsyncReceiver:
        """Receives from all children. Set by ``launch``."""
        ...

    async def launch(self) -> None:
        """Start all children without waiting until they are ready.

        Raises:
            EngineStartupError: a child could not be started.
        """
        ...

    async def begin_epoch(self) -> None:
        """Tell the scheduler to drop its requests and to continue in a new epoch. It answers with ``Ready``.

        Raises:
            BacklogFullError: the scheduler does not read its messages.
        """
        ...

    async def check_links(self) -> None:
        """Check that the children can connect to each other.

        Raises:
            EngineStartupError: they cannot, so messages between them would wait forever.
        """
        ...

    async def launch_detokenizer(self) -> None:
        """Start another detokenizer without waiting until it is ready. Called after the scheduler's ``Ready``.

        Raises:
            EngineStartupError: it could not be started.
        """
        ...

    def close(self) -> None:
        """Close the channels and remove all files. May be repeated."""
        ...
