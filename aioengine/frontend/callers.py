"""Callers: the process, loop, task or thread of a call, and the reasons to refuse it there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Hashable

from aioengine.errors import EngineClosedError, WrongLoopError


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the asyncio event loop of this thread.

    Raises:
        WrongLoopError: none is running (under trio, for example).
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise WrongLoopError("no asyncio event loop is running here; use asyncio.run(), or Engine") from None


def wrong_loop() -> WrongLoopError:
    """Return the error for a call of an AsyncEngine on another loop, or without one."""
    running_loop()
    return WrongLoopError("this AsyncEngine was started on another event loop; Engine can be called on any loop")


def forked(owner: int) -> EngineClosedError:
    """Return the error for a call in a fork of the process ``owner``."""
    return EngineClosedError(f"this process is a fork of the engine's process {owner}; start another engine here")


def this_caller() -> Hashable:
    """Return the running task, or the thread if there is none. It identifies a caller in the queue."""
    try:
        return asyncio.current_task() or threading.get_ident()
    except RuntimeError:
        return threading.get_ident()


def not_started() -> EngineClosedError:
    return EngineClosedError("the engine was not started: use `async with AsyncEngine(...)`, or `await engine.start()`")


def closed() -> EngineClosedError:
    return EngineClosedError("the engine was shut down; start an AsyncEngine again, or create another Engine")
