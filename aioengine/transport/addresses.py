"""Addresses of sockets: a private directory for each engine, and endpoints that cannot collide or be too long.

An endpoint is bound before it is published: the socket listens in this process, and its file descriptor is inherited by
the process that reads it. So no port is probed and then lost, and a sender may connect at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
from typing import NamedTuple

import zmq

_PREFIX = "aioengine-"
_OURS = re.compile(rf"{_PREFIX}[0-9a-f]{{12}}")
_BACKLOG = 64
BOARD_SUFFIX = ".board"
"""The suffix of the crash boards, which lie beside the sockets and the logs."""
MEDIA_SUFFIX = ".media"
"""The suffix of images in a directory of their own."""
SHARED_MEMORY = "/dev/shm"
"""Where engines put images, if there is room."""
_MAX_NAME = len("/detokenizer-99")


class Listener(NamedTuple):
    """A listening socket: where to connect, and its descriptor, which the reader takes over or the owner closes."""

    endpoint: str
    fd: int


class PrivateDirectory:
    """A directory of mode 0700 for the sockets and logs of one engine.

    It is locked as long as its engine lives. The lock ends with the process, also one in another container, so an
    unlocked directory was left behind, and the next engine that starts removes it.
    """

    def __init__(self, base: str | None = None) -> None:
        """Make and lock a new directory, and remove those that dead engines left beside it.

        ``base``: the folder for it; None: a place for sockets, which may be small. Then, at the start of an engine,
        those with images of dead engines are removed too, wherever they are.

        Raises:
            OSError: no writable directory was found.
        """
        if base is None:
            base = _choose_base()
            for place in {tempfile.gettempdir(), SHARED_MEMORY} - {base}:
                with contextlib.suppress(OSError):  # it is not there, or cannot be read: no image is in it
                    remove_stale(place)
        remove_stale(base)
        # It gets its final name when it is locked: before that another engine would take it for a stale one.
        draft = tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=base)
        self._lock = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = os.path.join(base, _PREFIX + secrets.token_hex(6))
        os.rename(draft, self.path)

    def remove(self) -> None:
        """Remove it with its files; harmless when repeated."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)


def listen(directory: str, name: str) -> Listener:
    """A new listening socket called ``name``.

    A path in ``directory`` where it fits and is UTF-8, else an abstract name, else a port of the loopback interface
    that the system chooses. (Other users can connect to the latter two, but their frames have another epoch.)

    Raises:
        OSError: none of the three is possible.
    """
    path = os.path.join(directory, name)
    unique = f"{_PREFIX}{secrets.token_hex(8)}-{name}"
    if len(os.fsencode(path)) <= zmq.IPC_PATH_MAX_LEN and _is_utf8(path):
        with contextlib.suppress(OSError):
            return _listen(socket.AF_UNIX, path, f"ipc://{path}")
    with contextlib.suppress(OSError):
        return _listen(socket.AF_UNIX, f"\0{unique}", f"ipc://@{unique}")
    return _listen(socket.AF_INET, ("127.0.0.1", 0), "tcp://127.0.0.1:{port}")


def _is_utf8(path: str) -> bool:
    """Whether the path can be part of an endpoint, which is UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _listen(family: socket.AddressFamily, address: str | tuple[str, int], endpoint: str) -> Listener:
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.bind(address)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        if family == socket.AF_INET:
            endpoint = endpoint.format(port=listening.getsockname()[1])
        return Listener(endpoint, listening.detach())


def is_reachable(endpoint: str) -> bool:
    """Whether the name of a listener has not been removed from the file system."""
    path = endpoint.removeprefix("ipc://")
    return not os.path.isabs(path) or os.path.exists(path)


def hide(listener: Listener) -> None:
    """Remove the name of a listener from the file system, so that no other process can connect there."""
    path = listener.endpoint.removeprefix("ipc://")
    if os.path.isabs(path):
        with contextlib.suppress(OSError):
            os.unlink(path)


def _choose_base() -> str:
    """The first directory that is writable, and short enough for paths of sockets where one is."""
    wanted = [os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", tempfile.gettempdir()]
    usable = [base for base in wanted if os.path.isabs(base) and os.access(base, os.W_OK | os.X_OK)]
    if not usable:
        raise OSError(
            f"no directory for the engine's sockets: none of {[base for base in wanted if base]} can be written to; "
            "set TMPDIR to one that can"
        )
    max_length = zmq.IPC_PATH_MAX_LEN - len(f"/{_PREFIX}{secrets.token_hex(6)}") - _MAX_NAME
    return next((base for base in usable if len(os.fsencode(base)) <= max_length), usable[0])


def remove_stale(base: str) -> None:
    """Remove the directories of dead engines of this user: those with such a name, and nothing else in them.

    Raises:
        OSError: ``base`` cannot be read.
    """
    with os.scandir(base) as entries:
        names = [entry.path for entry in entries if _OURS.fullmatch(entry.name)]
    for path in names:
        # A directory may belong to another user, or be removed by another engine at this moment.
        with contextlib.suppress(OSError):
            _remove_unlocked(path)


def _remove_unlocked(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        about = os.fstat(fd)
        if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) != 0o700:
            return
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with os.scandir(path) as entries:
            has_other_files = any(not _is_ours(entry) for entry in entries)
        if not has_other_files:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith((".log", BOARD_SUFFIX, MEDIA_SUFFIX)) or stat.S_ISSOCK(
        entry.stat(follow_symlinks=False).st_mode
    )
