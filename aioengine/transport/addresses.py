"""The private directory of each engine, for sockets, logs and images."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile

import zmq

_PREFIX = "aioengine-"
_OURS = re.compile(rf"{_PREFIX}[0-9a-f]{{12}}")
BOARD_SUFFIX = ".board"
"""The suffix of crash boards. They are in the directory of the sockets and logs."""
RANKS_FILE = "ranks"
"""The file in which the ranks exchange their addresses, beside the crash boards."""
MEDIA_SUFFIX = ".media"
"""The suffix of images in a directory of their own."""
SHARED_MEMORY = "/dev/shm"
"""The directory for images, if it has enough space."""
_MAX_NAME = len("/detokenizer-99")
"""Length of the longest name of a socket in the directory."""


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


def _choose_base() -> str:
    """Return the first writable directory with a path that is short enough for sockets."""
    max_length = zmq.IPC_PATH_MAX_LEN - len(f"/{_PREFIX}{secrets.token_hex(6)}") - _MAX_NAME
    for base in (os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", tempfile.gettempdir()):
        is_short = base.isascii() and len(base) <= max_length
        if os.path.isabs(base) and is_short and os.access(base, os.W_OK | os.X_OK):
            return base
    raise OSError("no directory for the engine's sockets can be written to; set TMPDIR to one with a short path")


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
    if entry.name == RANKS_FILE or entry.name.endswith((".log", BOARD_SUFFIX, MEDIA_SUFFIX)):
        return True
    return stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)
