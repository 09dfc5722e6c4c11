"""A child process after its start: watch, signal and reap it, read its log and its crash board."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import cast

from aioengine.errors import EngineStartupError
from aioengine.protocol.board import read_board
from aioengine.protocol.messages import Role
from aioengine.transport.addresses import BOARD_SUFFIX

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
        final_reason: "", because another child can be started (see ``RayChild``).
    """

    final_reason = ""

    def __init__(self, role: Role, popen: subprocess.Popen[bytes], log_path: Path) -> None:
        """log_path: file of its output, beside its crash board."""
        self.role = role
        self.pid = popen.pid
        self._popen = popen
        self._log_path = log_path
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
            with self._log_path.open("rb") as file:
                file.seek(max(0, self._log_path.stat().st_size - _MAX_LOG_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ()
        return tuple(line for line in text.splitlines() if line.strip())[-_NUM_LOG_LINES:]

    def uids_in_flight(self) -> dict[int, int]:
        """Return the rows of its current steps, or of its last steps before its exit: uid -> end of the row."""
        try:
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


_BOOTSTRAP = Path(__file__).resolve().parents[2] / "child_process" / "bootstrap.py"

_no_forks = threading.RLock()
"""Delays forks of this program while a child starts. A fork would inherit the pipe that ``Popen`` reads until it is
closed, so the start would wait until the fork exits."""
os.register_at_fork(before=_no_forks.acquire, after_in_parent=_no_forks.release, after_in_child=_no_forks.release)


def start_child(role: str, log_path: Path, orders: bytes, pass_fds: Collection[int] = ()) -> subprocess.Popen[bytes]:
    """Start the child with this role. It runs ``processes.<role>_process``, and its standard input stays open.

    log_path: file for its output; the child's working directory is the folder of this file.
    orders: one line without the newline.

    Raises:
        EngineStartupError: the process could not be started.
    """
    interpreter = cast("str | None", sys.executable)
    if not interpreter:  # the program embeds Python
        raise EngineStartupError(f"sys.executable is {interpreter!r}; set it to the path of a Python interpreter")
    command = [interpreter, "-P", str(_BOOTSTRAP), f"aioengine::{role}"]
    try:
        with log_path.open("wb") as log, _no_forks:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=tuple(pass_fds),
                cwd=log_path.parent,  # the program's working directory may be removed, and libraries need one
                start_new_session=True,  # the parent handles Ctrl-C in the terminal
            )
    except OSError as error:
        raise EngineStartupError(f"the {role} process could not be started with {interpreter!r}: {error}") from error
    assert popen.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the child has already exited; its exit is reported elsewhere
        path = b"\0".join(os.fsencode(entry) for entry in import_path())
        popen.stdin.write(b"%d\n%s%s\n" % (len(path), path, orders))
        popen.stdin.flush()
    return popen


def import_path() -> list[str]:
    """Return ``sys.path`` as absolute paths, for the children.

    The script's folder and the working directory come last. Their files are not libraries, and a file with the name of
    a module that only children import must not hide that module.
    """
    try:
        here = os.getcwd()
    except OSError:  # it was removed, so relative entries are left out
        here = ""
    main = sys.modules.get("__main__")
    script = vars(main).get("__file__") if main is not None else None
    incidental = {here, os.path.dirname(os.path.realpath(script)) if isinstance(script, str) else here}
    absolute = [
        os.path.normpath(os.path.join(here, entry))
        for entry in cast("list[object]", sys.path)
        if isinstance(entry, str) and "\0" not in entry  # Python ignores entries that cannot be paths
        if here or os.path.isabs(entry)
    ]
    return sorted(absolute, key=incidental.__contains__)
