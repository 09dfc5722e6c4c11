"""Processes: the interface between the frontend and the processes of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from aioengine.errors import EngineError
from aioengine.protocol.messages import Progress, ToFrontend

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from aioengine.protocol.messages import ToScheduler


class Events(Struct):
    """Callbacks of the processes. They run on the event loop of ``start``, and may be replaced at any time.

    on_messages: receives ``TextChunks``, ``Stats`` and ``Reply``. on_progress: receives the progress of a start.
    on_failure: called once if the engine fails.
    """

    on_messages: Callable[[list[ToFrontend]], None]
    on_failure: Callable[[EngineError], None]
    on_progress: Callable[[Progress], None]


class ProcessState(Struct, frozen=True):
    """The state of a child in ``health()``. Ages are in seconds; None if there was no heartbeat or no step yet."""

    role: str
    pid: int
    alive: bool
    last_heartbeat_s: float | None
    last_step_s: float | None


class Processes(Protocol):
    """The processes of an engine with one replica (``Supervisor``) or several (``Fleet``)."""

    async def start(self) -> dict[str, object]:
        """Start all processes, wait until they are ready, and return their facts. May be called once.

        Raises:
            EngineStartupError: a process failed. No process is left running.
        """
        ...

    def send(self, messages: Sequence[ToScheduler]) -> None:
        """Send requests and control calls. Never waits. Does nothing after the end."""
        ...

    async def stop(self, timeout_s: float) -> None:
        """End all processes within about ``timeout_s``."""
        ...

    def kill_now(self) -> None:
        """Kill all processes, from any thread and without an event loop. Does nothing in a fork of the owner."""
        ...

    def processes(self) -> list[ProcessState]:
        """Return the current state of each child."""
        ...

    def rows_in_flight(self) -> Collection[int]:
        """Return the uids of the requests in the current steps."""
        ...

    @property
    def num_restarts(self) -> int:
        """Number of times that children were replaced."""
        ...

    @property
    def is_recovering(self) -> bool:
        """Whether requests wait for replaced children."""
        ...
