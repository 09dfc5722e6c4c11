"""numpy, which takes some 50 ms to import: not with the package, since most programs ask for no arrays, and not on the
caller's loop, which would be held.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import TYPE_CHECKING

from aioengine.errors import RequestError, describe
from aioengine.supervision.tasks import post, start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    Waiter = Callable[[RequestError | None], None]


class ArrayImport:
    """Imports numpy once, on a thread, before the first request that is answered by arrays. On the engine's loop.

    Attributes:
        is_done: whether arrays can be made.
    """

    def __init__(self) -> None:
        self.is_done = False
        self._loop = asyncio.get_running_loop()
        self._waiters: list[Waiter] = []

    def wait(self, waiter: Waiter) -> None:
        """Call ``waiter`` after the import, with the error if it failed."""
        self._waiters.append(waiter)
        if len(self._waiters) == 1:
            start_thread(self._import, name="aioengine-import")

    def _import(self) -> None:
        error = None
        try:
            import_module("numpy")
        except BaseException as raised:
            error = RequestError("submit", f"numpy cannot be imported: {describe(raised)}")
        post(self._loop, self._end, error)

    def _end(self, error: RequestError | None) -> None:
        self.is_done = error is None
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            self._loop.call_soon(waiter, error)
