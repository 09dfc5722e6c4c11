"""A child process after its start: watch, signal and reap it, read its log and its crash board."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from aioengine.protocol.board import read_board
from aioengine.transport.addresses import BOARD_SUFFIX

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

    from aioengine.file_descriptors import SpareDescriptors
    from aioengine.protocol.messages import Role

KILL_WAIT_S = 1.0
"""Maximum time from the kill of a process to its exit. Its device memory is free only after the exit."""

_NUM_LOG_LINES = 20
_MAX_LOG_BYTES = 8192  # of the end of a log
_POLL_S = 0.05


class ProcessChild:
    """A child process. It exits when its standard input is closed by ``close``.

    Its exit status is only read here. ``Popen`` would treat an unknown exit code as 0.

    Attributes:
        exited: set after the exit of a watched child.
    """

    def __init__(self, role: Role, popen: subprocess.Popen[bytes], log_path: Path, spare: SpareDescriptors) -> None:
        """log_path: file of its output, beside its crash board. spare: freed while these files are read."""
        self.role = role
        self.pid = popen.pid
        self._popen = popen
        self._log_path = log_path
        self._spare = spare
        self.exited = asyncio.Event()
        self._on_exit: Callable[[], None] | None = None
        self._unwatch: Callable[[], None] | None = None
        self._lock = threading.RLock()  # a signal handler or a finalizer may interrupt this object and use it
        self._has_ended = False
        self._exit_code: int | None = None

    @property
    def is_alive(self) -> bool:
        self._reap()
        return not self._has_ended

    @property
    def exit_code(self) -> int | None:
        """The exit code, or minus the number of the signal. None: it runs, or the system did not keep the status."""
        self._reap()
        return self._exit_code

    def watch(self, on_exit: Callable[[], None]) -> None:
        """Call ``on_exit`` once on the running loop when the process has exited. Later calls do nothing.

        The exit is noticed by a descriptor of the process, or else by polling.
        """
        if self._on_exit is not None:
            return
        self._on_exit = on_exit
        loop = asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            self._unwatch = loop.call_soon(self._poll, loop).cancel
            return

        def unwatch() -> None:
            if not loop.is_closed():
                loop.remove_reader(fd)
            os.close(fd)

        self._unwatch = unwatch
        loop.add_reader(fd, self._ended)

    def terminate(self) -> None:
        """Ask the process to exit. Does nothing after its exit."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process. Does nothing after its exit."""
        self._signal(signal.SIGKILL)

    def reap(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for the exit. Blocks; needs no event loop."""
        deadline, pause_s = time.monotonic() + timeout_s, 0.0005
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S)

    def log_lines(self) -> tuple[str, ...]:
        """Return the last lines of its output."""
        try:
            with self._spare.lent(), self._log_path.open("rb") as file:
                file.seek(max(0, self._log_path.stat().st_size - _MAX_LOG_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ()
        return tuple(line for line in text.splitlines() if line.strip())[-_NUM_LOG_LINES:]

    def rows_in_flight(self) -> dict[int, int]:
        """Return the rows of its current steps, or of its last steps before its exit: uid -> end of the row."""
        try:
            with self._spare.lent():
                return read_board(self._log_path.with_suffix(BOARD_SUFFIX).read_bytes())
        except (OSError, ValueError):  # the directory was removed, or the file was truncated
            return {}

    def close(self) -> None:
        """Stop watching, and close the standard input. The process then exits if it still runs."""
        self._stop_watching()
        self._close_input()

    def _stop_watching(self) -> None:
        unwatch, self._unwatch = self._unwatch, None
        if unwatch is not None:
            unwatch()

    def _reap(self) -> None:
        """Read the exit status once, after the exit. There is no status if the program ignores SIGCHLD."""
        with self._lock:
            if self._has_ended:
                return
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # reaped by the system, or by another part of the program
                self._has_ended = True
            else:
                if pid == 0:
                    return
                self._has_ended, self._exit_code = True, os.waitstatus_to_exitcode(status)
            self._popen.returncode = self._exit_code or 0  # so that Popen does not wait for it

    def _signal(self, number: signal.Signals) -> None:
        if self.is_alive:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass
            except PermissionError:  # the program has changed its user since it started the process
                self._close_input()

    def _close_input(self) -> None:
        """Close the standard input of the process. The process then exits."""
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.is_alive:
            self._unwatch = loop.call_later(_POLL_S, self._poll, loop).cancel
        else:
            self._ended()

    def _ended(self) -> None:
        self._stop_watching()
        self.reap(_POLL_S)  # takes no time, because the exit status is available
        self.exited.set()
        if self._on_exit is not None:
            self._on_exit()
