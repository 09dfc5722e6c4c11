"""The one way to read the small files of a model folder: whatever is wrong with one is a ValueError that names it."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

_LFS_POINTER: Final = b"version https://git-lfs.github.com/spec/"

File = TypeVar("File")


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading. What is no regular file is not opened, which might wait for ever.

    Raises:
        FileNotFoundError, NotADirectoryError: there is none.
        ValueError: it is no regular file, may not be read, or is what Git LFS puts in place of one.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            kind = "a folder" if path.is_dir() else "a pipe, socket or device"
            raise ValueError(f"{str(path)!r} is {kind}, not a file")
        file = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    if is_pointer:
        file.close()
        raise ValueError(f"{str(path)!r} is a Git LFS pointer, not the file: run `git lfs pull` in its folder")
    file.seek(0)
    return file


def read_bytes(path: Path) -> bytes | None:
    """The contents of a file, None where there is none."""
    try:
        with open_file(path) as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from error


def read_text(path: Path) -> str | None:
    """The text of a file, None where there is none."""
    content = read_bytes(path)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from error


def read_json(path: Path, form: type[File]) -> File | None:
    """What a JSON file holds, None where there is no file."""
    content = read_bytes(path)
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=form)
    except RecursionError as error:
        raise ValueError(f"{str(path)!r} cannot be read: it is nested too deeply") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from error


def check_is_whole(path: Path) -> None:
    """Raises ValueError where there is something under the name of a file that cannot be one."""
    if os.path.lexists(path):
        try:
            open_file(path).close()
        except OSError as error:
            raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from error
