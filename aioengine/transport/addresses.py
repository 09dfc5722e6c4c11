"""Socket addresses: a private directory for each engine, and endpoints that cannot collide or be too long.

An endpoint is bound before it is published. The socket listens in this process, and the reading process inherits its
file descriptor. So no other process can take the port, and a sender may connect at any time.
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
"""The suffix of crash boards. They are in the directory of the sockets and logs."""
MEDIA_SUFFIX = ".media"
"""The suffix of images in a directory of their own."""
SHARED_MEMORY = "/dev/shm"
"""The directory for images, if it has enough space."""
_MAX_NAME = len("/detokenizer-99")


class Listener(NamedTuple):
    """A listening socket: its endpoint and its file descriptor. The reader or the owner closes it."""

    endpoint: str
    fd: int


class PrivateDirectory:
    """A directory of mode 0700 for the sockets and logs of one engine.

    It is locked while its engine lives. The lock ends with the process, even in another container. So the engine of an
    unlocked directory is dead, and the next engine removes the directory.
    """

    def __init__(self, base: str | None = None) -> None:
        """Create and lock a new directory in ``base``, and remove the directories of dead engines in it.

        base: None chooses a directory for sockets, and also removes the image directories of dead engines.

        Raises:
            OSError: there is no writable directory.
        """
        if base is None:
            base = _choose_base()
            for place in {tempfile.gettempdir(), SHARED_MEMORY} - {base}:
                with contextlib.suppress(OSError):  # it does not exist or cannot be read, so it has no images
                    remove_stale(place)
        remove_stale(base)
        # Rename it after locking, because another engine would remove an unlocked directory.
        draft = tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=base)
        self._lock = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = os.path.join(base, _PREFIX + secrets.token_hex(6))
        os.rename(draft, self.path)

    def remove(self) -> None:
        """Remove the directory with its files. May be repeated."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)


def listen(directory: str, name: str) -> Listener:
    """Create a listening socket with this name.

    It is a path in ``directory`` if the path is UTF-8 and short enough, else an abstract name, else a free port of the
    loopback interface. Other users can connect to the latter two, but their frames have another epoch.

    Raises:
        OSError: none of the three is possible.
    """
    path = os.path.join(directory, name)
    unique = f"{_PREFIX}{secrets.token_hex(8)}-{name}"
    with contextlib.suppress(OSError, UnicodeEncodeError):
        if len(path.encode()) <= zmq.IPC_PATH_MAX_LEN:
            return _listen(socket.AF_UNIX, path, f"ipc://{path}")
    with contextlib.suppress(OSError):
        return _listen(socket.AF_UNIX, f"\0{unique}", f"ipc://@{unique}")
    return _listen(socket.AF_INET, ("127.0.0.1", 0), "tcp://127.0.0.1:{port}")


def _listen(family: socket.AddressFamily, address: str | tuple[str, int], endpoint: str) -> Listener:
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.bind(address)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        if family == socket.AF_INET:
            endpoint = endpoint.format(port=listening.getsockname()[1])
        return Listener(endpoint, listening.detach())


def is_reachable(endpoint: str) -> bool:
    """Return whether the path of a listener still exists. True for endpoints without a path."""
    path = endpoint.removeprefix("ipc://")
    return not os.path.isabs(path) or os.path.exists(path)


def _choose_base() -> str:
    """Return the first writable directory that is short enough for socket paths, else the first writable one."""
    wanted = [os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", tempfile.gettempdir()]
    usable = [base for base in wanted if os.path.isabs(base) and os.access(base, os.W_OK | os.X_OK)]
    if not usable:
        raise OSError("no directory for the engine's sockets can be written to; set TMPDIR to a writable directory")
    max_length = zmq.IPC_PATH_MAX_LEN - len(f"/{_PREFIX}{secrets.token_hex(6)}") - _MAX_NAME
    return next((base for base in usable if len(os.fsencode(base)) <= max_length), usable[0])


def remove_stale(base: str) -> None:
    """Remove the directories of this user's dead engines, recognized by their names and contents.

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
