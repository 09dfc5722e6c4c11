"""What a launcher offers to the supervisor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aioengine.config import Settings
    from aioengine.protocol.messages import Role
    from aioengine.transport.base import AsyncReceiver, Sender


class RunningChild(Protocol):
    """One child after its start, running or ended."""

    @property
    def role(self) -> Role: ...

    @property
    def pid(self) -> int: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def exit_code(self) -> int | None:
        """Minus the number of the signal that ended it. None while it runs, and where the system did not keep it."""
        ...

    def watch(self, on_exit: Callable[[], None]) -> None:
        """Call ``on_exit`` on the running loop, once, when it has ended."""
        ...

    def terminate(self) -> None:
        """Ask it to end; harmless when it has."""
        ...

    def kill(self) -> None:
        """End it; harmless when it has."""
        ...

    def reap(self, timeout_s: float) -> None:
        """Wait for its end, blocking, so long at most; for when no loop can."""
        ...

    def log_lines(self) -> tuple[str, ...]:
        """The last lines that it wrote."""
        ...

    def rows_in_flight(self) -> dict[int, int]:
        """The requests in the steps that it computes, or was computing at its end: uid -> the end of its row."""
        ...


class Launcher(Protocol):
    """Makes the channels and starts the children, on one loop; ``close`` comes after the children's end."""

    def __init__(self, settings: Settings, roles: Sequence[Role]) -> None:
        """``roles``: of the children to start, one child each; SCHEDULER and DETOKENIZER are among them."""
        ...

    @property
    def children(self) -> list[RunningChild]:
        """One of each role: those that were started last, also when a launch failed half-way. Always the same list."""
        ...

    @property
    def sender(self) -> Sender:
        """To the scheduler; there after ``launch``."""
        ...

    @property
    def receiver(self) -> AsyncReceiver:
        """From all children; there after ``launch``."""
        ...

    async def launch(self) -> None:
        """Start all children, without waiting until they are ready.

        Raises:
            EngineStartupError: one could not be started at all.
        """
        ...

    async def begin_epoch(self) -> None:
        """Have the scheduler, which says when it is ready, go on without its requests and the detokenizer that ended.

        Raises:
            BacklogFullError: it does not take its messages.
        """
        ...

    async def check_links(self) -> None:
        """Check that the children could connect to each other.

        Raises:
            EngineStartupError: they could not, and messages from one to the other may wait for ever.
        """
        ...

    async def launch_detokenizer(self) -> None:
        """Start another detokenizer, once the scheduler is ready for it, without waiting until it is ready itself.

        Raises:
            EngineStartupError: it could not be started at all.
        """
        ...

    def close(self) -> None:
        """Close the channels and remove what was made; harmless when repeated."""
        ...
