"""Callers: the process, loop, task or thread of a call, and the reasons to refuse it there."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING

from aioengine.errors import EngineClosedError, WrongLoopError
from aioengine.supervision.tasks import runs_here

if TYPE_CHECKING:
    from collections.abc import Hashable


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the asyncio event loop of this thread.

    Raises:
        WrongLoopError: none is running (under trio, for example).
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise WrongLoopError(
            "aioengine needs asyncio, and no asyncio event loop is running here (trio is not supported): await this "
            "under asyncio.run(), or anyio.run() with its asyncio backend, or call the synchronous methods of Engine "
            "in a thread"
        ) from None


def wrong_loop() -> WrongLoopError:
    """Return the error for a call of an AsyncEngine on another loop, or without one."""
    running_loop()
    return WrongLoopError(
        "an AsyncEngine belongs to the event loop on which it was started, and this is another one; "
        "use Engine to call from several loops and threads"
    )


def refuse_fork(owner: int) -> None:
    """Raise EngineClosedError unless this process has the id ``owner``."""
    if os.getpid() != owner:
        raise EngineClosedError(
            f"this engine belongs to process {owner}, and this process ({os.getpid()}) is a fork of it; "
            "create an Engine, or start an AsyncEngine, in the process that uses it"
        )


def this_caller() -> Hashable:
    """Return the running task, or the thread if there is none. It identifies a caller in the queue."""
    try:
        return asyncio.current_task() or threading.get_ident()
    except RuntimeError:
        return threading.get_ident()


def is_interrupted(lock: threading.RLock) -> bool:
    """Whether this thread already holds the engine's lock.

    A signal handler or a finalizer can interrupt the engine's code anywhere. If it waited for the engine, it would wait
    for the interrupted code.
    """
    return bool(lock._is_owned())  # type: ignore[attr-defined]  # pyright: ignore


def refuse_interrupting(lock: threading.RLock) -> None:
    """Raise RuntimeError if this thread already holds the engine's lock."""
    if is_interrupted(lock):
        raise RuntimeError(
            "a signal handler or finalizer interrupted the engine on this thread, so it can neither start nor read a "
            "request here; only abort_request(), abort(), close(), stats() and health() may be called. Hand other "
            "calls to another thread or to the event loop (loop.call_soon_threadsafe)"
        )


def refuse_own_thread(loop: asyncio.AbstractEventLoop) -> None:
    """Raise RuntimeError in a callback on the engine's loop, which must not block."""
    if runs_here(loop):
        raise RuntimeError(
            "a call from the engine's own thread would wait for itself; log handlers and other callbacks on this "
            "thread must hand the call to another thread"
        )


def not_started() -> EngineClosedError:
    return EngineClosedError("the engine was not started: use `async with AsyncEngine(...)`, or `await engine.start()`")


def closed() -> EngineClosedError:
    return EngineClosedError(
        "the engine was shut down; an AsyncEngine can be started again (`await engine.start()`), an Engine cannot: "
        "create another Engine"
    )
