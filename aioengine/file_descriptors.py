"""File descriptors: the standard ones of a process, its limit, and a check that enough are free."""

from __future__ import annotations

import ctypes
import errno
import os
import resource

from aioengine.errors import EngineStartupError

FOR_AN_ENGINE = 52
"""Descriptors that a start needs: for processes and their channels, and the model's files."""
_ENOUGH = 4096
_NONE_IS_FREE = errno.EMFILE, errno.ENFILE
_close = ctypes.PyDLL(None).close
"""``os.close`` that keeps the interpreter's lock, so no other Python thread runs and takes the descriptor."""


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


def require_descriptors(count: int) -> None:
    """Raise EngineStartupError if this process cannot open ``count`` more files now.

    Event loops and libzmq abort the program if no descriptor is free. Create them directly after this call: then other
    threads can take the descriptors only if they are opening a file already.
    """
    opened: list[int] = []
    try:
        while len(opened) < count:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in _NONE_IS_FREE:
            raise _shortage(count, len(opened)) from error
        text = (
            f"an engine needs {os.devnull}, which cannot be opened: {error}; mount /dev in this container or chroot, "
            "or create the device"
        )
        raise EngineStartupError(text) from error
    finally:
        for fd in opened:
            _close(fd)


def check_cause(error: BaseException) -> None:
    """Raise EngineStartupError if an error of a start came because other threads had taken the last descriptors."""
    for cause in (error, error.__cause__):
        if isinstance(cause, OSError) and cause.errno in _NONE_IS_FREE:
            raise _shortage(FOR_AN_ENGINE, 0) from error


def _shortage(count: int, num_free: int) -> EngineStartupError:
    return EngineStartupError(
        f"an engine needs {count} free file descriptors, and only {num_free} are free: this program may open "
        f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} at a time; raise that limit (ulimit -n, or "
        "resource.setrlimit) or open fewer files"
    )
