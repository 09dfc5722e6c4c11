"""The asyncio event loop that an awaitable of the engine needs."""

from __future__ import annotations

import asyncio

from aioengine.errors import WrongLoopError


def running_loop() -> asyncio.AbstractEventLoop:
    """The asyncio event loop that runs on this thread.

    Raises:
        WrongLoopError: there is none, as under trio.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise without_loop() from None


def without_loop() -> WrongLoopError:
    return WrongLoopError(
        "aioengine needs asyncio, and no asyncio event loop is running here (trio is not supported): await this under "
        "asyncio.run(), or anyio.run() with its asyncio backend, or call the synchronous methods of Engine in a thread"
    )
