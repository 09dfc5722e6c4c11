"""A limit of time for a call of foreign code, by a timer signal, in processes that are the engine's own.

A process that has installed a ``TimerSignal`` uses signal and timer for nothing else. In others, such as a program that
runs the engine in its own process, calls have no limit: its signals belong to the program.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

T = TypeVar("T")


class OutOfTimeError(BaseException):
    """The call took too long. No ``Exception``: the called code may catch these."""


class TimerSignal:
    """The handler of SIGALRM. Belongs to the main thread."""

    def __init__(self) -> None:
        self._is_armed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise in the call that is out of time, once, and never after it has returned."""
        if self._is_armed:
            self._is_armed = False
            raise OutOfTimeError

    def run(self, call: Callable[[], T], limit_s: float) -> T:
        """What ``call`` returns. Raises OutOfTimeError after ``limit_s`` seconds; what is stuck in C ends later."""
        wakeup_fd = signal.set_wakeup_fd(-1)  # else the signal's byte would stay in it, and it readable, for ever
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
    """Have this process, which is the engine's own, limit the time of calls. In its main thread."""
    signal.signal(signal.SIGALRM, TimerSignal())


def run_limited(call: Callable[[], T], limit_s: float) -> T:
    """What ``call`` returns. Raises OutOfTimeError after ``limit_s`` seconds, in a process of the engine's own."""
    handler = signal.getsignal(signal.SIGALRM)
    return handler.run(call, limit_s) if isinstance(handler, TimerSignal) else call()
