"""Heartbeats: the age of each child's last sign of life, and which child has been silent for too long."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Final

from aioengine.errors import EngineStalledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aioengine.protocol.messages import Role

    OnStall = Callable[[Role, EngineStalledError], None]

NUM_TICKS: Final = 8
"""A child that is silent for more ticks than this has stalled."""

MAX_WORK_S: Final = 600.0
"""How long a control call may take, such as writing a profile, without being a stall."""


class Heartbeats:
    """When each child gave its last sign of life.

    Silence is counted in ticks of this loop, not read from a clock: where the program itself was stopped (in a
    terminal, or with a laptop's lid closed), one tick has passed, and the children's messages are read before the next.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self._tick_s = stall_timeout_s / NUM_TICKS
        self._seen_at: dict[Role, float] = {}
        self._num_silent: dict[Role, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def record(self, role: Role, now: float) -> None:
        """A child gave a sign of life: a message, or the end of a step."""
        self._seen_at[role] = now
        self._num_silent[role] = 0

    def excuse(self, role: Role) -> None:
        """A child has begun long work: its next sign of life may come up to ``MAX_WORK_S`` later than allowed."""
        self._num_silent[role] = -math.ceil(MAX_WORK_S / self._tick_s)

    def age_s(self, role: Role, now: float) -> float | None:
        """Seconds since the child's last sign of life; None: there was none."""
        seen_at = self._seen_at.get(role)
        return None if seen_at is None else now - seen_at

    def watch(self, roles: Iterable[Role], on_stall: OnStall) -> None:
        """Call ``on_stall`` once, with the role and an error, when one of these is silent for too long."""
        self._num_silent = dict.fromkeys(roles, 0)
        self._wait(on_stall)

    def stop(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, on_stall: OnStall) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick, on_stall)

    def _tick(self, on_stall: OnStall) -> None:
        self._timer = None
        for role in self._num_silent:
            self._num_silent[role] += 1
            if self._num_silent[role] > NUM_TICKS:
                silent_s = self.age_s(role, time.monotonic()) or 0.0
                text = (
                    f"the {role} process is alive, but gave no sign of life and ended no step for {silent_s:.1f} "
                    "seconds (stall_timeout), so it was killed; shut the engine down and start a new one"
                )
                on_stall(role, EngineStalledError(text))
                return
        self._wait(on_stall)
