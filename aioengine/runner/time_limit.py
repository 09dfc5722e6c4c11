"""A time limit for calls of user code, by a timer signal, in the engine's own processes.

A process with a ``TimerSignal`` uses this signal and timer for nothing else. If a program runs the engine in its own
process, calls have no limit, because the signals belong to the program.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


class OutOfTimeError(BaseException):
    """The call took too long. Not an ``Exception``, because the called code may catch these."""


class TimerSignal:
    """The handler of SIGALRM. Used in the main thread only."""

    def __init__(self) -> None:
        self._is_armed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise OutOfTimeError in the running call, once, and never after it has returned."""
        if self._is_armed:
            self._is_armed = False
            raise OutOfTimeError

    def run(self, call: Callable[[], T], limit_s: float) -> T:
        """Return the result of ``call``. Raises OutOfTimeError after ``limit_s`` seconds, or after a running C call."""
        wakeup_fd = signal.set_wakeup_fd(-1)  # else the signal's byte would stay in it unread
        try:
            try:
                self._is_armed = True
                signal.setitimer(signal.ITIMER_REAL, limit_s)
                return call()
            finally:
                self._is_armed = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)


def install_timer_signal() -> None:
    """Enable time limits in this process, which must be the engine's own. Called in the main thread."""
    signal.signal(signal.SIGALRM, TimerSignal())


def run_limited(call: Callable[[], T], limit_s: float) -> T:
    """Return the result of ``call``. In the engine's own processes, raises OutOfTimeError after ``limit_s`` seconds."""
    handler = signal.getsignal(signal.SIGALRM)
    return handler.run(call, limit_s) if isinstance(handler, TimerSignal) else call()
