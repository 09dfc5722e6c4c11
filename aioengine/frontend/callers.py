"""Where a call comes from: its process, loop, task or thread, and the places in which none may start."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import TYPE_CHECKING, Final, TypeVar

from aioengine.errors import EngineClosedError, WrongLoopError
from aioengine.supervision.tasks import runs_here

if TYPE_CHECKING:
    from collections.abc import Hashable

Value = TypeVar("Value")

MAX_FRAMES: Final = 150
"""Stack frames that starting a call may need, with a margin; a test measures it."""


def running_loop() -> asyncio.AbstractEventLoop:
    """The asyncio event loop that runs on this thread.

    Raises:
        WrongLoopError: there is none, as under trio.
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
    """Raise EngineClosedError in any other process than the one with this id, which owns the engine."""
    if os.getpid() != owner:
        raise EngineClosedError(
            f"this engine belongs to process {owner}, and this process ({os.getpid()}) is a fork of it; "
            "make an engine, or start an AsyncEngine, in the process that uses it"
        )


def this_caller() -> Hashable:
    """The running task, or else the thread: the owner of a place in the queue."""
    try:
        return asyncio.current_task() or threading.get_ident()
    except RuntimeError:
        return threading.get_ident()


def is_deep_stack() -> bool:
    """Whether the engine's own code might reach the recursion limit here, half-way through what it does."""
    try:
        sys._getframe(max(0, sys.getrecursionlimit() - MAX_FRAMES))
    except ValueError:  # the stack is not that deep
        return False
    return True


def deep_stack() -> RecursionError:
    return RecursionError(f"a call to the engine needs {MAX_FRAMES} stack frames below the recursion limit")


def is_interrupted(lock: threading.RLock) -> bool:
    """Whether this thread already holds the engine's lock.

    A signal handler, or a finalizer that garbage collection runs, can interrupt the engine's own code anywhere. Waiting
    there for the engine would be waiting for the interrupted code.
    """
    return bool(lock._is_owned())  # type: ignore[attr-defined]  # pyright: ignore


def refuse_interrupting(lock: threading.RLock) -> None:
    """Raise RuntimeError where this thread already holds the engine's lock."""
    if lock._is_owned():  # type: ignore[attr-defined]  # pyright: ignore
        raise RuntimeError(
            "a signal handler or finalizer interrupted the engine on this thread, so it can neither start nor read a "
            "request here; abort_request(), abort(), close(), stats() and health() may be called, everything else "
            "must be handed to another thread or to the event loop (loop.call_soon_threadsafe)"
        )


def refuse_own_thread(loop: asyncio.AbstractEventLoop) -> None:
    """Raise RuntimeError in a callback on the engine's loop: to block there is to wait for oneself."""
    if runs_here(loop):
        raise RuntimeError(
            "a call from the engine's own thread would wait for itself; a log handler or another callback that runs "
            "there must hand it to another thread"
        )


def not_started() -> EngineClosedError:
    return EngineClosedError("the engine was not started: use `async with AsyncEngine(...)`, or `await engine.start()`")


def closed() -> EngineClosedError:
    return EngineClosedError(
        "the engine was shut down; an AsyncEngine can be started again (`await engine.start()`), an Engine is made anew"
    )
