"""The children of one engine together: hear of each one's end, end all of them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from aioengine.protocol.messages import Role
    from aioengine.supervision.launchers._base import RunningChild

KILL_WAIT_S = 1.0
"""So long a killed process may take to be gone (memory of a device is given back then)."""


class Family:
    """``children`` is the launcher's list, which changes when it starts some. ``on_exit`` is told who has ended."""

    def __init__(self, children: list[RunningChild], on_exit: Callable[[RunningChild], None]) -> None:
        self.children = children
        self._on_exit = on_exit
        self._exits: dict[RunningChild, asyncio.Event] = {}
        self._dismissed: RunningChild | None = None

    def ended(self, roles: Collection[Role]) -> list[RunningChild]:
        """Those of these roles that have ended."""
        return [child for child in self.children if child.role in roles and not child.is_alive]

    def watch(self) -> None:
        """Hear of the ends of all children, on the running loop; those that are watched already are left out."""
        self._exits = {child: exited for child, exited in self._exits.items() if child in self.children}
        for child in self.children:
            if child not in self._exits:
                self._watch(child)

    async def end(self, polite_s: float) -> None:
        """Ask all to end, give them ``polite_s`` seconds, and kill what is left then."""
        self.watch()  # a start that was cancelled half-way had not come to this
        if polite_s > 0:
            for child in self.children:
                child.terminate()
            await self._wait_for_exits(polite_s)
        self.kill()
        await self._wait_for_exits(KILL_WAIT_S)

    async def end_one(self, role: Role) -> None:
        """Kill the child of this role; nobody is told of its end any more."""
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
        """Kill all and wait for it, without a loop."""
        self.kill()
        for child in self.children:
            child.reap(KILL_WAIT_S)

    def _watch(self, child: RunningChild) -> None:
        exited = self._exits[child] = asyncio.Event()

        def on_exit() -> None:
            exited.set()
            if child is not self._dismissed:
                self._on_exit(child)

        child.watch(on_exit)

    async def _wait_for_exits(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for exited in list(self._exits.values()):
                    await exited.wait()
