"""File descriptors: the standard ones of a process, its limit, and a reserve for code that must not run out of them."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from typing import TYPE_CHECKING

from aioengine.errors import EngineStartupError

if TYPE_CHECKING:
    from collections.abc import Generator

FOR_AN_ENGINE = 52
"""Descriptors that a start needs: for processes and their channels, the launcher's reserve, and the model's files."""
_ENOUGH = 4096


def hold_standard_descriptors() -> None:
    """Open the null device as standard input, output or error if these are closed.

    Otherwise the next socket gets one of their numbers. Then event loops abort when they close it, writes to the
    standard stream go into the socket, and a child inherits it as its own stream.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)  # as standard streams are
    os.close(fd)


def raise_descriptor_limit() -> None:
    """Raise the limit of this process to a few thousand, or to its hard limit.

    Only child processes call this; the limit of the user's process belongs to the user.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class SpareDescriptors:
    """A reserve of open descriptors, which are closed just before others are needed.

    Event loops and libzmq abort the program if no descriptor is free, and other code of the program may use up all
    descriptors at any time.
    """

    def __init__(self) -> None:
        self._held: list[int] = []

    def __del__(self) -> None:
        self.free()

    def hold(self, count: int) -> bool:
        """Hold at least ``count``. Returns False if fewer were free."""
        try:
            self._open(count)
        except OSError:
            return False
        return True

    def require(self, count: int) -> None:
        """Hold at least ``count``.

        Raises EngineStartupError if fewer are free or there is no null device. Then none is held.
        """
        try:
            self._open(count)
        except OSError as error:
            num_free = len(self._held)
            self.free()
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise EngineStartupError(
                    f"an engine needs {os.devnull}, which cannot be opened: {error}; mount /dev in this container or "
                    "chroot, or create the device"
                ) from error
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise EngineStartupError(
                f"an engine needs {count} free file descriptors, and only {num_free} are free: this program may open "
                f"{limit} at a time; raise that limit (ulimit -n, or resource.setrlimit) or open fewer files"
            ) from error

    def _open(self, count: int) -> None:
        while len(self._held) < count:
            self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def free(self, *, keep: int = 0) -> None:
        """Close all but ``keep`` of them."""
        with contextlib.suppress(IndexError):  # another thread ends the engine at this moment
            while len(self._held) > keep:
                os.close(self._held.pop())

    @contextlib.contextmanager
    def lent(self, count: int | None = None, *, used: int = 0) -> Generator[None]:
        """Close ``count`` of them, or all, during a block which opens ``used`` descriptors that stay open.

        Afterwards, hold the others again, or as many as are free.
        """
        before = len(self._held)
        self.free(keep=0 if count is None else max(0, before - count))
        try:
            yield
        finally:
            self.hold(before - used)


def require_descriptors(count: int) -> None:
    """Raise EngineStartupError if this process cannot open ``count`` more files now."""
    spare = SpareDescriptors()
    spare.require(count)
    spare.free()
