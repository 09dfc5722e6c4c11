"""Signs of life of the children: how old the last of each is, and who has given none for too long."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from aioengine.errors import EngineStalledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aioengine.protocol.messages import Role

    OnStall = Callable[[Role, EngineStalledError], None]

NUM_TICKS: Final = 8


class Heartbeats:
    """When each child was last heard of.

    Silence is counted in ticks of this loop, not read from a clock: where the program itself slept (stopped in a
    terminal, a laptop's lid closed), one tick has passed, and the children's messages are read before the next.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self._tick_s = stall_timeout_s / NUM_TICKS
        self._heard_at: dict[Role, float] = {}
        self._num_silent: dict[Role, int] = {}
        self._is_watching = False
        self._timer: asyncio.TimerHandle | None = None

    def hear(self, role: Role, now: float) -> None:
        """The child shows that it lives: it answers, or a step of it has ended."""
        self._heard_at[role] = now
        self._num_silent[role] = 0

    def age_s(self, role: Role, now: float) -> float | None:
        """Seconds since the child was last heard of; None: never."""
        heard_at = self._heard_at.get(role)
        return None if heard_at is None else now - heard_at

    def watch(self, roles: Iterable[Role], on_stall: OnStall) -> None:
        """Call ``on_stall`` once, with the role, when one of these is silent for longer than allowed."""
        self._num_silent = dict.fromkeys(roles, 0)
        self._is_watching = True
        self._wait(on_stall)

    def give_up(self) -> None:
        """Watch no longer. From any thread: the timer runs out by itself."""
        self._is_watching = False

    def stop(self) -> None:
        """Watch no longer, and take the timer back; on the loop."""
        self.give_up()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, on_stall: OnStall) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick, on_stall)

    def _tick(self, on_stall: OnStall) -> None:
        self._timer = None
        if not self._is_watching:
            return
        for role in self._num_silent:
            self._num_silent[role] += 1
            if self._num_silent[role] > NUM_TICKS:
                on_stall(role, self._describe(role))
                return
        self._wait(on_stall)

    def _describe(self, role: Role) -> EngineStalledError:
        silent_s = self.age_s(role, time.monotonic()) or 0.0
        return EngineStalledError(
            f"the {role} process lives, but nothing of it was heard and no step of it has ended for {silent_s:.1f} "
            "seconds (stall_timeout), so it was ended; shut the engine down and start a new one"
        )
