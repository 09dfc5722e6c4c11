"""Processes: what the frontend needs of the processes that serve an engine, and what these report to it."""

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
    """Where the processes report to, always on the loop on which they were started. May change while they run.

    ``on_messages`` receives ``TextChunks``, ``Stats`` and ``Reply``; ``on_progress`` how far a start is.
    ``on_failure`` is called once, when the engine has failed by itself.
    """

    on_messages: Callable[[list[ToFrontend]], None]
    on_failure: Callable[[EngineError], None]
    on_progress: Callable[[Progress], None]


class ProcessState(Struct, frozen=True):
    """A child as ``health()`` shows it. Ages are in seconds; None: no sign of life, or no step, yet."""

    role: str
    pid: int
    alive: bool
    last_heartbeat_s: float | None
    last_step_s: float | None


class Processes(Protocol):
    """The processes of an engine: those of one replica (``Supervisor``) or of several (``Fleet``)."""

    async def start(self) -> dict[str, object]:
        """Start all, wait until they are ready, and return their facts. Once only.

        Raises:
            EngineStartupError: one of them failed; none is left running.
        """
        ...

    def send(self, messages: Sequence[ToScheduler]) -> None:
        """Send requests and controls. Never waits; does nothing after the end."""
        ...

    async def stop(self, timeout_s: float) -> None:
        """End all within about ``timeout_s``."""
        ...

    def kill_now(self) -> None:
        """End all at once, from any thread and without a loop. Does nothing in a fork of the owner."""
        ...

    def processes(self) -> list[ProcessState]:
        """Every child as it is now."""
        ...

    def rows_in_flight(self) -> Collection[int]:
        """The uids of the requests in the steps that are computed now."""
        ...

    @property
    def num_restarts(self) -> int:
        """How often children were replaced."""
        ...

    @property
    def is_recovering(self) -> bool:
        """Whether requests wait for new children."""
        ...
