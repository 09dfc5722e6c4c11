"""Family: watches and ends the children of one launcher together."""

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
"""Maximum time from the kill of a process to its exit. Its device memory is free only after the exit."""


class Family:
    """The children of a launcher.

    children: the launcher's list; the launcher adds and removes children. on_exit: called with a child after its exit.
    """

    def __init__(self, children: Sequence[RunningChild], on_exit: Callable[[RunningChild], None]) -> None:
        self.children = children
        self._on_exit = on_exit
        self._exits: dict[RunningChild, asyncio.Event] = {}
        self._dismissed: RunningChild | None = None

    def ended(self, roles: Collection[Role]) -> list[RunningChild]:
        """Return the children with these roles that have exited."""
        return [child for child in self.children if child.role in roles and not child.is_alive]

    def watch(self) -> None:
        """Start to watch the exits of all children that are not watched yet, on the running loop."""
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
        """Ask all children to exit, wait up to ``polite_s`` seconds, and kill the remaining ones."""
        self.watch()  # a cancelled start may not have called it
        if polite_s > 0:
            for child in self.children:
                child.terminate()
            await self._wait_for_exits(polite_s)
        self.kill()
        await self._wait_for_exits(KILL_WAIT_S)

    async def end_one(self, role: Role) -> None:
        """Kill the child with this role and wait for its exit. The exit is not reported to ``on_exit``."""
        for child in self.children:
            if child.role == role:
                self._dismissed = child
                child.kill()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(KILL_WAIT_S):
                        await self._exits[child].wait()

    def kill(self) -> None:
        """Kill all children without waiting."""
        for child in self.children:
            child.kill()

    def kill_and_reap(self) -> None:
        """Kill all children and wait for their exits. Blocks; needs no event loop."""
        self.kill()
        for child in self.children:
            child.reap(KILL_WAIT_S)

    async def _wait_for_exits(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for exited in list(self._exits.values()):
                    await exited.wait()
