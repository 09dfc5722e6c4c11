"""The interfaces of launchers and of the children that they start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from aioengine.protocol.messages import Role
    from aioengine.settings.config import Settings
    from aioengine.transport.base import AsyncReceiver, Sender

KILL_WAIT_S = 1.0
"""Maximum time from the kill of a process to its exit. Its device memory is free only after the exit."""


class RunningChild(Protocol):
    """A child after its start, running or not."""

    @property
    def role(self) -> Role: ...

    @property
    def pid(self) -> int: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def exit_code(self) -> int | None:
        """Minus the number of the signal that killed it. None: it runs, or the system did not keep the status."""
        ...

    @property
    def exited(self) -> asyncio.Event:
        """Set after the exit of a watched child."""
        ...

    def watch(self, on_exit: Callable[[], None]) -> None:
        """Call ``on_exit`` once on the running loop when the child has exited. Later calls do nothing."""
        ...

    def terminate(self) -> None:
        """Ask it to exit; harmless when it has."""
        ...

    def kill(self) -> None:
        """Kill it; harmless when it has exited."""
        ...

    def reap(self, timeout_s: float) -> None:
        """Wait for its exit up to ``timeout_s``, blocking; for places without a loop."""
        ...

    def log_lines(self) -> tuple[str, ...]:
        """The last lines that it wrote."""
        ...

    def rows_in_flight(self) -> dict[int, int]:
        """The requests in the steps that it computes, or computed at its exit: uid -> the end of its row."""
        ...


class Launcher(Protocol):
    """Makes the channels and starts the children, on one loop; closed when the children have exited."""

    def __init__(self, settings: Settings, roles: Sequence[Role]) -> None:
        """``roles``: one child is started for each; SCHEDULER and DETOKENIZER are among them."""
        ...

    @property
    def children(self) -> Sequence[RunningChild]:
        """The last child of each role, also when a launch failed half-way. Always the same list."""
        ...

    @property
    def sender(self) -> Sender:
        """To the scheduler; set by ``launch``."""
        ...

    @property
    def receiver(self) -> AsyncReceiver:
        """From all children; set by ``launch``."""
        ...

    async def launch(self) -> None:
        """Start all children, without waiting until they are ready.

        Raises:
            EngineStartupError: one could not be started at all.
        """
        ...

    async def begin_epoch(self) -> None:
        """Have the scheduler go on without its requests and the lost detokenizer. It sends ``Ready`` then.

        Raises:
            BacklogFullError: the scheduler does not take its messages.
        """
        ...

    async def check_links(self) -> None:
        """Check that the children could connect to each other.

        Raises:
            EngineStartupError: they could not, and messages from one to the other may wait for ever.
        """
        ...

    async def launch_detokenizer(self) -> None:
        """Start another detokenizer, after the scheduler's ``Ready``, without waiting until it is ready.

        Raises:
            EngineStartupError: it could not be started at all.
        """
        ...

    def close(self) -> None:
        """Close the channels and remove all files; harmless when repeated."""
        ...
