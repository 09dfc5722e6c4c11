"""Family: the children of one start, watched and ended together."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from aioengine.protocol.messages import Role
    from aioengine.supervision.launchers._base import RunningChild

KILL_WAIT_S = 1.0
"""How long a killed process may take to be gone; only then is its memory of a device free."""


class Family:
    """The children of a launcher, whose list changes when it starts some. ``on_exit`` receives each that exited."""

    def __init__(self, children: Sequence[RunningChild], on_exit: Callable[[RunningChild], None]) -> None:
        self.children = children
        self._on_exit = on_exit
        self._exits: dict[RunningChild, asyncio.Event] = {}
        self._dismissed: RunningChild | None = None

    def ended(self, roles: Collection[Role]) -> list[RunningChild]:
        """The children of these roles that have exited."""
        return [child for child in self.children if child.role in roles and not child.is_alive]

    def watch(self) -> None:
        """Watch all children for their exits, on the running loop; those that are watched already stay so."""
        self._exits = {child: exited for child, exited in self._exits.items() if child in self.children}
        for child in self.children:
            if child not in self._exits:
                exited = self._exits[child] = asyncio.Event()
                child.watch(partial(self._exited, child, exited))

    def _exited(self, child: RunningChild, exited: asyncio.Event) -> None:
        exited.set()
        if child is not self._dismissed:
            self._on_exit(child)

    async def end(self, polite_s: float) -> None:
        """Ask all to exit, wait up to ``polite_s`` seconds, and kill the rest."""
        self.watch()  # a start that was cancelled half-way did not get to this
        if polite_s > 0:
            for child in self.children:
                child.terminate()
            await self._wait_for_exits(polite_s)
        self.kill()
        await self._wait_for_exits(KILL_WAIT_S)

    async def end_one(self, role: Role) -> None:
        """Kill the child of this role, whose exit is not reported any more."""
        for child in self.children:
            if child.role == role:
                self._dismissed = child
                child.kill()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(KILL_WAIT_S):
                        await self._exits[child].wait()

    def kill(self) -> None:
        """Kill all, without waiting."""
        for child in self.children:
            child.kill()

    def kill_and_reap(self) -> None:
        """Kill all and wait for their exits, without a loop."""
        self.kill()
        for child in self.children:
            child.reap(KILL_WAIT_S)

    async def _wait_for_exits(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for exited in list(self._exits.values()):
                    await exited.wait()
