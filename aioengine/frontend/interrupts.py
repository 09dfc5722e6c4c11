"""Places in which a call must not begin: deep in the stack, and in a handler that interrupted the engine itself."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import threading

MAX_FRAMES: Final = 150
"""Stack frames that beginning a call may need, with room to spare; tests measure it."""


def is_deep_stack() -> bool:
    """Whether the engine's own code might reach the recursion limit here, half-way through what it does."""
    try:
        sys._getframe(max(0, sys.getrecursionlimit() - MAX_FRAMES))
    except ValueError:  # the stack is not that deep
        return False
    return True


def refuse_deep_stack() -> None:
    """Raise RecursionError while nothing is registered, where beginning a call might reach the recursion limit."""
    if is_deep_stack():
        raise RecursionError(f"a call to the engine needs {MAX_FRAMES} stack frames below the recursion limit")


def is_interrupted(lock: threading.RLock) -> bool:
    """Whether this thread already holds the engine's lock.

    A signal handler, or a finalizer that garbage collection runs, can interrupt the engine's own code anywhere. Waiting
    there for the engine would be waiting for the interrupted code.
    """
    return bool(lock._is_owned())  # type: ignore[attr-defined]  # pyright: ignore


def refuse_interrupting(lock: threading.RLock) -> None:
    """Raise RuntimeError where this thread already holds the engine's lock."""
    if is_interrupted(lock):
        raise RuntimeError(
            "a signal handler or finalizer interrupted the engine on this thread, so it can neither start nor read a "
            "request here; abort_request(), abort(), close(), stats() and health() may be called, everything else "
            "must be handed to another thread or to the event loop (loop.call_soon_threadsafe)"
        )


def runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this thread is just running ``loop``."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def refuse_own_thread(loop: asyncio.AbstractEventLoop) -> None:
    """Raise RuntimeError in a callback on the engine's loop: to block there is to wait for oneself."""
    if runs_here(loop):
        raise RuntimeError(
            "a call from the engine's own thread would wait for itself; a log handler or another callback that runs "
            "there must hand it to another thread"
        )
