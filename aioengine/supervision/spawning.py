"""Starts a child: a new interpreter with the import path of this program."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, cast

from aioengine.errors import EngineStartupError

if TYPE_CHECKING:
    from collections.abc import Collection

_BOOTSTRAP = Path(__file__).resolve().parents[1] / "child_process" / "bootstrap.py"

_no_forks = threading.RLock()
"""Delays forks of this program while a child starts. A fork would inherit the pipe that ``Popen`` reads until it is
closed, so the start would wait until the fork exits."""
os.register_at_fork(before=_no_forks.acquire, after_in_parent=_no_forks.release, after_in_child=_no_forks.release)


def start_child(role: str, log_path: Path, orders: bytes, pass_fds: Collection[int]) -> subprocess.Popen[bytes]:
    """Start the child with this role. It runs ``processes.<role>_process``, and its standard input stays open.

    log_path: file for its output; the child's working directory is the folder of this file.
    orders: one line without the newline.

    Raises:
        EngineStartupError: the process could not be started.
    """
    interpreter = cast("str | None", sys.executable)
    if not interpreter:  # the program embeds Python
        raise EngineStartupError(
            f"the {role} process needs a Python interpreter, and sys.executable is {interpreter!r}; "
            "set it to the path of an interpreter that has the packages of this program"
        )
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
